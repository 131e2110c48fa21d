"""Whether a call is traced with level 1 of the cache, without the rest of it."""

import pytest

from fusekit.cute import cache
from fusekit.cute.replaced import Replaced
from tests.cute.rig import Rig


class Stopped(BaseException):
    """Ends a call of `cute.compile` before the trace: that and the rest cost much, and are not asked for."""


class Subject:
    """Says whether a call is traced."""

    def __init__(self, folder, work):
        self.work, self.rig = work, Rig(folder / "store", folder / "report")
        self.replaced = Replaced()

    def traced(self):
        """Why `work` would be traced; "" if it would not."""
        return self._stopped(steps=1)

    def never_served(self):
        """Why what the trace read is not kept; "" if it is."""
        return self._stopped(steps=2)

    def _stopped(self, steps):
        original = cache.Cache.untraced

        def untraced(served, call):
            served._replaced = self.replaced  # which sees what changes
            answers = original(served, call)
            for _ in range(steps):
                answer = next(answers)
                if answer is not None:
                    yield answer
                    return
                if steps > 1:
                    yield None
            answers.close()
            raise Stopped(served._thread.why)

        untraced.__code__ = untraced.__code__.replace(co_filename="<fusekit>")  # it runs while the trace is recorded
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(cache.Cache, "untraced", untraced)
            try:
                counts, _ = self.rig.run(self.work, level=1)
            except Stopped as stopped:
                return str(stopped) or "; no record"
        assert counts == (1, 0)
        return ""


def filled(folder, work):
    subject = Subject(folder, work)
    assert subject.rig.counted(work, level=1) == (0, 1)
    assert not subject.traced()
    return subject
