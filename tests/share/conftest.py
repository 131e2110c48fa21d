"""Fixtures of the tests of what moves between stores: those of the store's tests."""

from tests.store.conftest import aside, bundle, keys, make_entry, make_record, store, unprivileged, url

__all__ = ["aside", "bundle", "keys", "make_entry", "make_record", "store", "unprivileged", "url"]
