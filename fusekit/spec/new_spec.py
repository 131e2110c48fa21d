"""The text of a commented spec file for a model."""

import json
import textwrap
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from fusekit.errors import SpecError
from fusekit.plan.operations import Schema
from fusekit.spec.fields import Field
from fusekit.spec.hf_model import Model
from fusekit.spec.layer import LAYER
from fusekit.spec.model_kernels import Kernel, Request, Sizes, sizes_of
from fusekit.spec.model_layer import parts
from fusekit.spec.parse import parse_text
from fusekit.spec.schemas import schema_of

WIDTH = 118
SCHEMA_FILE = "fusekit.schema.json"


@dataclass(frozen=True, slots=True)
class NewSpec:
    """A spec file. layers: in it, name to summary; missing_layers: name to reason; kernels: single ones, likewise.
    notes: what the file says of the model.
    """

    text: str
    layers: Mapping[str, str]
    missing_layers: Mapping[str, str]
    kernels: Mapping[str, str]
    missing_kernels: Mapping[str, str]
    notes: tuple[str, ...]


def new_spec(model: Model, request: Request) -> NewSpec:
    """The spec file. Raises SpecError where no MLP fits, or the ranks do not divide the experts."""
    sizes = sizes_of(model, request)
    writer = _SpecWriter(model, request, sizes)
    writer.header()
    for part in parts(model, sizes, request):
        if not writer.section(part.title, part.kernels):
            for title, kernels in part.instead:
                writer.section(title, kernels)
    if not writer.fits:
        whys = dict.fromkeys(writer.missing_layers.values() or writer.missing_kernels.values())
        raise SpecError(f"{request.origin}: no kernel fits this model: {'; '.join(whys)}")
    text = "\n".join(writer.lines) + "\n"
    parse_text(text, request.name)  # what is written can be read
    return NewSpec(
        text, writer.layers, writer.missing_layers, writer.kernels, writer.missing_kernels, tuple(writer.notes)
    )


def toml(value: Any) -> str:
    """The value as a TOML file has it: a string, a number, a boolean, or a table of them on one line."""
    if isinstance(value, Mapping):
        return "{ " + ", ".join(f"{name} = {toml(item)}" for name, item in value.items()) + " }"
    return json.dumps(value)


def _schema(fields: Mapping[str, Any]) -> Schema:
    return LAYER if "kind" in fields else schema_of(fields["op"])


class _SpecWriter:
    """The lines of the file. A field is explained where it first appears."""

    def __init__(self, model: Model, request: Request, sizes: Sizes) -> None:
        self.model, self.request, self.sizes = model, request, sizes
        self.lines: list[str] = []
        self.explained: set[str] = set()
        self.fits = False  # whether a kernel is of the model's dtype: what only chooses experts is no use alone
        self.layers: dict[str, str] = {}
        self.missing_layers: dict[str, str] = {}
        self.kernels: dict[str, str] = {}
        self.missing_kernels: dict[str, str] = {}
        self.notes = [*self._notes()]

    def comment(self, text: str, indent: str = "") -> None:
        """Wrapped lines of a comment; what TOML does not allow in one becomes a question mark."""
        clean = "".join(character if character.isprintable() else "?" for character in text)
        self.lines += textwrap.wrap(
            clean, WIDTH, initial_indent="# ", subsequent_indent=f"# {indent}", break_on_hyphens=False
        )

    def header(self) -> None:
        """The file's purpose, the model's numbers, and what is not in it."""
        model, request, sizes = self.model, self.request, self.sizes
        file = f"{request.name}.toml"
        self.lines += [f"#:schema ./{SCHEMA_FILE}"]
        self.comment(
            f"Layers of {request.name}, by `fusekit new` from {request.origin} (model_type {model.model_type}). "
            f"`fusekit build {file}` builds their kernels, and with --dry-run says which. `fusekit show "
            f"{request.name}/NAME` lists arguments. tile, cluster and schedule are chosen for each problem. An editor "
            f"checks the fields once `fusekit schema > {SCHEMA_FILE}` has been run in this folder."
        )
        self.lines += ["#"]
        self.comment(
            f"H = {model.hidden} is the hidden size, I an intermediate size, T = {sizes.tokens} tokens a launch."
        )
        router = model.router
        if router is not None:
            of = "" if request.ranks == 1 else f" on each of {request.ranks} ranks"
            self.comment(
                f"X = {router.experts} experts, K = {router.topk} of them for each token. "
                f"E = {sizes.groups} experts{of} share M = T K = {sizes.rows} rows{', on average' if of else ''}."
            )
        for note in self.notes:
            self.comment(f"- {note}.", "  ")
        summary = f"{request.name}: MLP of one layer, {model.dtype}"
        self.lines += ["", "schema = 1", f"summary = {toml(summary)}", "", "[defaults]"]
        shared = {field.name: field for field in schema_of("grouped-gemm").fields}
        self._key(shared["arch"], request.arch)
        self._key(shared["dtype"], model.dtype)

    def _notes(self) -> Iterator[str]:
        model, request = self.model, self.request
        yield from model.notes
        if (door := request.outside) is not None:
            rows = " To the layer each row that it has sorted is a token with one expert." if door.rows else ""
            yield f"{door.package} keeps the router and shared experts, and calls the layer.{rows}".rstrip(".")
            return
        if model.router is not None and model.router.why:
            yield f"the router is not covered: {model.router.why}"
        if request.ranks > 1:
            how = (
                "moe has the experts of one rank. Its tokens are the rows that the exchange brings, one for each "
                "choice, with the number of the expert on this rank and its weight"
            )
            layer_note = f"a layer of all experts with ranks = {request.ranks} has its own, for GPUs of one machine"
            yield f"{how}. The exchange is not covered; {layer_note}"
        router = model.router
        if router is None:
            return
        apart = request.ranks > 1
        if apart and any(mlp.scaled for mlp in model.mlps):
            yield "the shared expert's output is multiplied by sigmoid(x . shared_expert_gate): not covered over ranks"
        if router.bias and apart:
            yield "the router's linear layer has a bias; its logits x . Wr^T + b are not covered"
        if router.aux_loss and router.aux_note and not router.why and request.training:
            layer = "; the layer's is that of all its tokens, so aux_loss is left out" if router.by_sequence else ""
            yield router.aux_note if apart else f"{router.aux_note.partition(';')[0]}{layer}"

    def section(self, title: str, kernels: list[Kernel]) -> bool:
        """A title, and the kernels that fit; the others as comments with the reason. Whether all fit."""
        self.lines += [""]
        self.comment(f"---- {title}.", "     ")
        fitting = [self._kernel(kernel) for kernel in kernels]
        return all(fitting)

    def _kernel(self, kernel: Kernel) -> bool:
        table = {"name": kernel.name, "summary": kernel.summary, **kernel.keys}
        why = kernel.why or self._refusal(table)
        self.lines += [""]
        if why:
            (self.missing_layers if "kind" in kernel.keys else self.missing_kernels)[kernel.name] = why
            self.comment(f"Left out: {kernel.name} ({kernel.summary}). {why}.", "  ")
            return False
        (self.layers if "kind" in kernel.keys else self.kernels)[kernel.name] = kernel.summary
        self.comment(kernel.tensors, "  ")
        self.lines += ["[[kernel]]"]
        docs = {field.name: field for field in _schema(kernel.keys).fields}
        self.fits |= "dtype" in docs and "dtype" not in table
        for name, value in table.items():
            self._key(docs[name], value)
        return True

    def _refusal(self, table: Mapping[str, Any]) -> str:
        """Why the kernel cannot be built; empty where it can."""
        known = {field.name for field in _schema(table).fields}
        shared = {"arch": self.request.arch, "dtype": self.model.dtype}
        whole: dict[str, Any] = {**{name: value for name, value in shared.items() if name in known}, **table}
        try:
            parse_text(
                "\n".join(["schema = 1", "[[kernel]]", *(f"{name} = {toml(whole[name])}" for name in whole)]), "new"
            )
        except SpecError as error:
            where = f"[[kernel]] 1 ({table['name']}): "
            return "; ".join(problem.removeprefix(where) for problem in error.problems) or str(error)
        return ""

    def _key(self, field: Field, value: Any) -> None:
        line, doc = f"{field.name} = {toml(value)}", self._doc(field, value)
        if doc and len(line) + len(doc) + 4 <= WIDTH:
            line = f"{line}  # {doc}"
        elif doc:
            self.comment(f"{field.name}: {doc}", "  ")
        self.lines += [line]

    def _doc(self, field: Field, value: Any) -> str:
        """The meaning of a field, the first time that it appears in the file."""
        parts = [field.doc] + [
            f"{subfield.name}: {subfield.doc}" for subfield in field.fields if subfield.name in value
        ]
        new = [part for part in parts if field.name != "name" and part not in self.explained]
        self.explained.update(new)
        return " ".join(new)
