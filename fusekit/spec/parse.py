"""TOML text -> expanded, validated specs. All problems of a file are reported in one SpecError; of a large one those of
its fields first.
"""

import os
import re
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from fusekit.errors import SpecError, SpecWarning
from fusekit.plan.arch import DEFAULT
from fusekit.plan.operations import Schema, operation
from fusekit.spec import document
from fusekit.spec.fields import FILE_FIELDS, KERNEL_ONLY, NAME_PATTERN, NAME_RULE
from fusekit.spec.schemas import Spec, schema_of, schemas
from fusekit.spec.sweep import Expansion, Index, combinations, expand, indexed
from fusekit.spec.values import BAD, MAX_PROBLEMS, TableReader, TooManyError, bare, nearest, show, type_name

SCHEMA_VERSION = 1
MAX_KERNELS = 4096  # of a file; a sweep that makes more is a slip
SOON = 512  # so many are expanded to find more problems, where some are known already
NOTICED = 8  # of what a sweep leaves out, notices, and combinations in one


def parse_file(
    path: str | os.PathLike[str], namespace: str | None = None, arch: str | None = None, unsaid: Sequence[str] = (),
    defaults: Mapping[str, Any] = MappingProxyType({}),
) -> tuple[Spec, ...]:  # fmt: skip
    """Every kernel of a spec file, sweeps expanded, in file order. Raises SpecError.

    namespace, arch: instead of the file's own. unsaid: architectures of kernels for which the file names none; empty:
    that of `defaults`, or the usual one, with a SpecWarning. defaults: those of a project, for keys that the file does
    not give, as far as its kernels have them.
    """
    path = Path(path)
    return parse_text(document.read(path), path.stem, str(path), namespace, arch, unsaid, defaults)


def parse_text(
    text: str, stem: str, source: str | None = None, namespace: str | None = None, arch: str | None = None,
    unsaid: Sequence[str] = (), defaults: Mapping[str, Any] = MappingProxyType({}),
) -> tuple[Spec, ...]:  # fmt: skip
    """Like `parse_file`, from the text; `stem` begins the names, `source` is what errors call the file."""
    source = source or f"{stem}.toml"
    if not re.fullmatch(NAME_PATTERN, stem):
        raise SpecError(f"{source}: the stem {show(stem)} begins every kernel's name; {NAME_RULE}; rename the file")
    if not text.strip():
        raise SpecError(
            f"{source}: the file is empty; a spec has schema = {SCHEMA_VERSION} and at least one [[kernel]] table"
        )
    reader = TableReader()
    parsed = document.parse(text, source)
    if arch is not None:
        parsed = _for_arch(parsed, arch)
    nameless = _nameless(parsed)
    if nameless:
        named = list(unsaid) or defaults.get("arch")
        parsed = parsed | {"defaults": parsed.get("defaults", {}) | {"arch": named or DEFAULT.name}}
    file = _File(reader, parsed, stem, namespace, defaults)
    if nameless and not named:
        file.notices.append(f"{nameless} names no arch, and is for {DEFAULT.name}; [defaults] or --arch names one")
    try:
        specs = file.expand()
    except TooManyError:
        raise _error(source, reader.problems, "; there may be more: fix these first") from None
    if reader.problems:
        raise _error(source, reader.problems)
    for notice in file.notices[:MAX_PROBLEMS]:
        warnings.warn(f"{source}: {notice}", SpecWarning, stacklevel=2)
    return specs


def _nameless(parsed: dict[str, Any]) -> str:
    """The first kernel for which neither its table nor [defaults] names an architecture; empty: there is none."""
    defaults, kernels = parsed.get("defaults", {}), parsed.get("kernel", [])
    if not isinstance(defaults, dict) or not isinstance(kernels, list) or "arch" in defaults:
        return ""
    names = (str(table.get("name")) for table in kernels if isinstance(table, dict) and "arch" not in table)
    return next(names, "")


def _for_arch(parsed: dict[str, Any], arch: str) -> dict[str, Any]:
    """The document with `arch` wherever it names an architecture."""

    def changed(table: Any) -> Any:
        return {**table, "arch": arch} if isinstance(table, dict) and "arch" in table else table

    changed_tables = {name: changed(table) for name, table in parsed.items()}
    if isinstance(kernels := changed_tables.get("kernel"), list):
        changed_tables["kernel"] = [changed(table) for table in kernels]
    return changed_tables


def _error(source: str, lines: tuple[str, ...], more: str = "") -> SpecError:
    if len(lines) == 1:
        return SpecError(f"{source}: {lines[0]}", problems=lines)
    text = "\n".join(f"  {line}" for line in lines)
    return SpecError(f"{source}: {len(lines)} problems{more}\n{text}", problems=lines)


class _Table(NamedTuple):
    """A [[kernel]] table. own: its values by field; shared: those of [defaults]; values: both, and defaults."""

    where: str
    schema: Schema
    given: dict[str, Any]
    shared: dict[str, Any]
    values: dict[str, Any]


def _complete(schema: Schema, given: dict[str, Any], shared: dict[str, Any], summary: Any) -> dict[str, Any] | None:
    """The value of every field; None where a problem of one has been reported."""
    values = {
        field.name: (field.default,) if field.sweep else field.default
        for field in schema.fields
        if field.name not in KERNEL_ONLY
    }
    values |= {"summary": summary} | shared | given
    for name in (field.name for field in schema.fields if field.type == "json"):
        if isinstance(shared.get(name), dict) and isinstance(given.get(name), dict):
            values[name] = {**shared[name], **given[name]}
    if any(values.get(field.name) in (None, (None,)) for field in schema.fields if field.required):
        return None
    return None if any(value is BAD for value in values.values()) else values


class _File:
    def __init__(
        self, reader: TableReader, document: dict[str, Any], stem: str, namespace: str | None = None,
        project: Mapping[str, Any] = MappingProxyType({}),
    ) -> None:  # fmt: skip
        self.reader, self.document, self.stem, self.project = reader, document, stem, project
        self.namespace = document.get("namespace") if namespace is None else namespace
        self.kernels = 0
        self.notices: list[str] = []
        self.excluded: tuple[Any, Index] = ((), {})  # of the last table; many share the one of [defaults]

    def expand(self) -> tuple[Spec, ...]:
        self._check_top()
        self._qualify()
        defaults = self._table("defaults")
        kernels = self._kernels()
        used = [self._schema(table, defaults) for table in kernels]
        known = {field.name for schema in used for field in schema.defaults_fields} - {"op", "kind"}
        defaults = {name: value for name, value in self.project.items() if name in known} | defaults
        if any(not self._known(table, defaults, schema) for table, schema in zip(kernels, used, strict=True)):
            theirs = {field.name for schema in used for field in schema.fields}
            defaults = {name: value for name, value in defaults.items() if name in theirs}
        shared = self._shared(defaults, used)
        summary = self.document.get("summary", "")
        read: list[_Table] = []  # all are counted before any is expanded, which takes longer
        seen: dict[str, int] = {}
        for number, table in enumerate(kernels, start=1):
            where = f"[[kernel]] {number}"
            name = table.get("name")
            where += f" ({name}): " if isinstance(name, str) and re.fullmatch(NAME_PATTERN, name) else ": "
            if isinstance(name, str) and seen.setdefault(name, number) != number:
                self.reader.report(
                    where, "name", name, f"[[kernel]] {seen[name]} has this name already; name them apart"
                )
            schema = self._schema(table, defaults)
            if schema.ops == () and "op" in table:
                rule = "a table has an op, and is a kernel, or a kind, and is a layer; leave one of the two out"
                self.reader.report(where, "op", table["op"], rule)
                table = {field: value for field, value in table.items() if field != "op"}
            if not self._known(table, defaults, schema):  # its fields are not known either
                op = next(field for field in schema.fields if field.name == "op")
                if "op" in table:
                    self.reader.value(where, op, table["op"])
                elif "op" not in defaults:
                    self.reader.missing(where, op)
                continue
            given, inherited = self.reader.table(where, table, schema.fields, complete=False), shared[schema.ops]
            for field in schema.fields:
                if field.required and field.name not in given and field.name not in inherited:
                    self.reader.missing(where, field)
            if values := _complete(schema, given, inherited, summary):
                self._count(where, schema, values)
                read.append(_Table(where, schema, given, inherited, values))
        self._check_parts(kernels, defaults, seen)
        if self.reader.problems and self.kernels > SOON:
            raise TooManyError
        return tuple(spec for table in read for spec in self._variants(table))

    def _check_parts(self, kernels: list[dict[str, Any]], defaults: dict[str, Any], seen: Mapping[str, int]) -> None:
        """A layer's kernels are called `layer.part`: what else begins so would be taken for one of them."""
        layers = {
            table["name"] for table in kernels
            if not self._schema(table, defaults).ops and isinstance(table.get("name"), str)
        }  # fmt: skip
        for name, number in seen.items():
            layer = next((layer_name for layer_name in layers if name.startswith(f"{layer_name}.")), None)
            if layer is not None:
                rule = f'names that begin with "{layer}." are of the kernels of the layer {layer}; name it otherwise'
                self.reader.report(f"[[kernel]] {number} ({name}): ", "name", name, rule)

    def _schema(self, table: dict[str, Any], defaults: dict[str, Any]) -> Schema:
        if "kind" in table or ("kind" in defaults and "op" not in table):
            from fusekit.spec.layer import LAYER

            return LAYER
        return schema_of(table.get("op", defaults.get("op")))

    def _known(self, table: dict[str, Any], defaults: dict[str, Any], schema: Schema) -> bool:
        """Whether a table is of a layer, or has an operation that there is."""
        return not schema.ops or operation(table.get("op", defaults.get("op"))) is not None

    def _shared(self, defaults: dict[str, Any], used: list[Schema]) -> dict[tuple[str, ...], dict[str, Any]]:
        """The values of [defaults] by the operations of each schema that the file uses.

        A schema leaves aside what only another one in the file knows. What none knows is an error.
        """
        used = list({schema.ops: schema for schema in used or [schema_of(None)]}.values())
        known = {field.name for schema in used for field in schema.defaults_fields}
        theirs = {field.name for schema in used for field in schema.fields if field.name not in KERNEL_ONLY} - known
        for name in sorted(defaults.keys() & theirs):
            rule = f"is said in the [[kernel]] table that it is for; move {name} there"
            self.reader.report("[defaults]: ", name, defaults[name], rule)
        known |= theirs
        shared = {}
        for number, schema in enumerate(used):
            names = {field.name for field in schema.defaults_fields} | (set(defaults) - known if number == 0 else set())
            given = {name: value for name, value in defaults.items() if name in names}
            shared[schema.ops] = self.reader.table("[defaults]: ", given, schema.defaults_fields, complete=False)
        return shared

    def _check_top(self) -> None:
        known = {field.name: field for field in FILE_FIELDS}
        for name, value in self.document.items():
            if name in known:
                continue
            hint = nearest(name, known)
            if not hint and name == "layer":
                hint = '; a layer is a [[kernel]] table with kind = "moe" or "mlp"'
            if not hint and any(field.name == name for schema in schemas() for field in schema.fields):
                hint = f"; {name} belongs into a [[kernel]] table or [defaults]"
            hint = hint or f"; the top level has {', '.join(known)}"
            self.reader.add(f"top level: {bare(name)} = {show(value)}: there is no such field{hint}")
        version = self.document.get("schema")
        if version is None:
            self.reader.add(f"top level: schema is missing: begin the file with schema = {SCHEMA_VERSION}")
        elif version != SCHEMA_VERSION or isinstance(version, bool) or not isinstance(version, int):
            rule = f"this version of fusekit reads schema = {SCHEMA_VERSION} (an integer)"
            self.reader.report("top level: ", "schema", version, rule)
        for name in ("$schema", "summary"):
            if name in self.document:
                self.reader.value("top level: ", known[name], self.document[name])

    def _qualify(self) -> None:
        """Puts the namespace before the stem."""
        if self.namespace is None:
            return
        name = f"{self.namespace}.{self.stem}"
        if isinstance(self.namespace, str) and all(re.fullmatch(NAME_PATTERN, part) for part in (self.namespace, name)):
            self.stem = name
        else:
            rule = f"begins every kernel's name, as namespace.{self.stem}; {NAME_RULE}"
            self.reader.report("top level: ", "namespace", self.namespace, rule)

    def _table(self, name: str) -> dict[str, Any]:
        value = self.document.get(name, {})
        if isinstance(value, dict):
            return value
        self.reader.report("top level: ", name, value, f"must be a table, is {type_name(value)}; write [{name}]")
        return {}

    def _kernels(self) -> list[dict[str, Any]]:
        value = self.document.get("kernel")
        if value is None or value == []:
            if "layer" not in self.document:  # whose problem says what to write
                self.reader.add("top level: there is no [[kernel]] table; a spec file names at least one kernel")
        elif isinstance(value, dict):
            self.reader.add("top level: [kernel] is a single table; write [[kernel]], with two brackets")
        elif not isinstance(value, list) or not all(isinstance(item, dict) for item in value):
            self.reader.report("top level: ", "kernel", value, "must be [[kernel]] tables")
        else:
            return value
        return []

    def _variants(self, table: _Table) -> list[Spec]:
        where, excluded = table.where, table.values.get("exclude") or ()
        if excluded is not self.excluded[0]:
            self.excluded = excluded, indexed(excluded)
        expansion: Expansion
        if table.schema.expand:
            expansion = table.schema.expand(self.stem, table.values)
        else:
            expansion = expand(table.schema, self.stem, table.values, self.excluded[1])
        for field, value, rule in expansion.broken:
            base = field.partition(".")[0]
            origin = "from [defaults]: " if base in table.shared and base not in table.given else ""
            self.reader.report(f"{where}{origin}", field, value, rule)
        self._notice(where, expansion, table.given)
        return expansion.specs

    def _count(self, where: str, schema: Schema, values: dict[str, Any]) -> None:
        count = combinations(schema, values)
        self.kernels += count
        if self.kernels > MAX_KERNELS:
            swept = [f"{len(values[field])} {field}" for field in schema.sweep_fields if len(values[field]) > 1]
            more = f"a layer of {count} kernels at most" if schema.expand else "one kernel more"
            product = f"{' x '.join(swept)} = {count} kernels" if swept else more
            message = f"{where}{product}; a file makes at most {MAX_KERNELS}; sweep less, or split the file"
            self.reader.add(message)
            raise TooManyError

    def _notice(self, where: str, expansion: Expansion, given: dict[str, Any]) -> None:
        by_rule: dict[tuple[str, ...], list[str]] = {}
        for swept, rules in expansion.dropped:
            by_rule.setdefault(rules, []).append(f"{{ {swept} }}")
        message = f"{where}left out of the sweep: "
        for rules, tables in list(by_rule.items())[: NOTICED - 1]:
            some = ", ".join(tables[:NOTICED]) + (" and more" if len(tables) > NOTICED else "")
            self.notices.append(f"{message}{some}: {'; '.join(rules)}; name it in exclude to say so")
        if more := sum(map(len, list(by_rule.values())[NOTICED - 1 :])):
            self.notices.append(f"{message}{more} combinations more")
        for number in sorted(expansion.unused if "exclude" in given else ()):
            table = show(given["exclude"][number - 1])
            self.notices.append(f"{where}exclude: no combination of the sweep has {table}; leave that out")
