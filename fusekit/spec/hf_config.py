"""The MLPs and the router of a model, read from its Hugging Face `config.json`.

Each model type of `hf_families.FAMILIES` is read as the class of that name in Transformers computes it. A model type
outside the list, a field of the wrong type and fields that contradict each other are errors. What the file leaves out
takes the default of that class, and is said in `Model.notes`; so are fields that such a class does not read.
"""

import json
from difflib import get_close_matches

from fusekit.errors import SpecError
from fusekit.plan.layer.options import MXFP4
from fusekit.plan.quant import BLOCK
from fusekit.spec.config_fields import Fields
from fusekit.spec.hf_families import FAMILIES
from fusekit.spec.hf_model import Model
from fusekit.spec.values import show, type_name

MAX_BYTES = 2**22  # of a config.json; real ones have a few kilobytes


def read_model(text: str, source: str, family: str | None = None) -> Model:
    """The model of a `config.json`.

    source: what errors call the file. family: the model type to read it as, instead of its own. Raises SpecError for
    what is not a config, a model type that is not known, and fields that are missing or contradict each other.
    """
    try:
        document = json.loads(text.removeprefix("\ufeff"))  # some editors write a byte order mark
    except (ValueError, RecursionError) as error:
        reason = "nested too deeply" if isinstance(error, RecursionError) else str(error)
        raise SpecError(f"{source}: not JSON: {reason}; give the config.json of a Hugging Face model") from None
    if not isinstance(document, dict):
        raise SpecError(f"{source}: it holds {type_name(document)}; a config.json holds one object")
    outer = Fields(document, source)
    thinker = outer.values.get("thinker_config")  # of the "omni" models, which speak with other layers
    inner = (thinker if isinstance(thinker, dict) else outer.values).get("text_config")
    fields = outer
    if isinstance(inner, dict) and "hidden_size" not in outer.values:
        shared = ("model_type", "dtype", "torch_dtype", "quantization_config")
        above = {name: outer.values.get(name) for name in shared}
        fields = Fields(above | {name: value for name, value in inner.items() if value is not None}, source)
        fields.notes.append("only text_config is read: other parts of the model, such as vision, have no kernels here")
        if "talker_config" in outer.values:
            fields.notes.append("the talker's layers are not in the file: give talker_config's text_config as a config")
    model_type = fields.word("model_type")
    name = family or model_type
    if name not in FAMILIES:
        near = ", ".join(get_close_matches(name[:100], FAMILIES, 3, 0.0))
        if family:
            raise fields.error(f"--family {show(family)} is not known; the nearest are {near}; completion lists all")
        raise fields.error(
            f"model_type = {show(name)}: how its MLPs are computed is not known; by name, the nearest that are known "
            f"are {near}; if its MLPs and router are those of a known one, name that with --family"
        )
    mlps, router = FAMILIES[name](fields)
    hidden = fields.size("hidden_size")
    if family and family != model_type:
        fields.check_activations(family)
        fields.notes.insert(
            0, f"the config's model_type is {show(model_type)}; it is read as {family}, as was asked for"
        )
    dtype = _dtype(fields)
    quantised, weights = _quantised(fields, model_type)
    notes = (*fields.notes, *fields.unread(), *quantised)
    return Model(model_type, hidden, mlps, router, dtype, notes, weights if dtype == "bf16" else "none")


def _dtype(fields: Fields) -> str:
    value = fields.values.get("dtype", fields.values.get("torch_dtype", "bfloat16"))
    if value == "float16":
        return "fp16"
    if value != "bfloat16":
        fields.notes.append(f"torch_dtype is {show(value)}: the kernels take 16-bit operands, here bf16")
    return "bf16"


def _quantised(fields: Fields, model_type: str) -> tuple[list[str], str]:
    """(notes, a layer's `weights`) of the checkpoint."""
    config = fields.values.get("quantization_config")
    if not config:
        return [], "none"
    method = config.get("quant_method", config) if isinstance(config, dict) else config
    if isinstance(config, dict) and method == "fp8" and config.get("weight_block_size") == [128, 128]:
        return [_as_they_are("e4m3 values with 128x128 scales", BLOCK)], BLOCK
    if method == "mxfp4" and model_type == "gpt_oss":
        return [_as_they_are("experts of e2m1 values with a scale for 32", MXFP4)], MXFP4
    note = (
        f"the checkpoint is quantised ({show(method)}): these kernels take 16-bit weights; dequantise them when loading"
    )
    return [note], "none"


def _as_they_are(what: str, weights: str) -> str:
    return (
        f'the checkpoint has {what}: layers for inference with weights = "{weights}" read them as they are; for '
        "others, dequantise them when loading"
    )
