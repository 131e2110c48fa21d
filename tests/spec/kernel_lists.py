"""The spec of a model with every single kernel, as `new_spec` writes those of a layer that does not fit."""

from unittest.mock import patch

from fusekit.spec.hf_model import Model
from fusekit.spec.model_kernels import Request, sections
from fusekit.spec.model_layer import Part
from fusekit.spec.new_spec import new_spec


def kernel_list(model: Model, request: Request) -> str:
    with patch("fusekit.spec.new_spec.parts", lambda *given: [Part(*section) for section in sections(*given)]):
        return new_spec(model, request).text
