"""Symbols of kernels: readable, one for each cubin, and what the cubin has."""

import re
from dataclasses import replace

import pytest

from fusekit.abi import LaunchRecord
from fusekit.compiler import cubin as cubins
from fusekit.compiler.symbols import symbol_of
from fusekit.spec import find, parse_text
from fusekit.spec.extern import EXTERN
from fusekit.store.keys import canonical_json

SPECS = [spec for spec in find() if spec.op != EXTERN]
NAMES = {
    "quickstart/moe-fc1@128x192-c2x1": "grouped_bf16_swiglu_128x192_c2x1",
    "quickstart/linear": "dense_bf16_gelu_128x128_c2x1",
    "gpt-oss-120b/fc2-dgrad@128x192-c2x1-dynamic": "grouped_bf16_dswiglu_nmajor_128x192_c2x1_dyn",
    "deepseek-v3/moe-fp8.fc1-infer@128x256-c2x1-dynamic": "grouped_fp8_block_swiglu_128x256_c2x1_coop_dyn",
    "mixtral-8x7b/fc1-wgrad@256x192-c2x1-dynamic": "grouped_wgrad_bf16_256x192_c2x1_coop_dyn",
    "gpt-oss-20b/moe.router-topk": "router_topk_f32_e32_k4_w8",
    "deepseek-v3/moe-fp8.quantise-w1": "quantise_fp8_block_bf16_w8",
    "exchange/qwen3-30b-dispatch-x2": "moe_dispatch_bf16_e128_k8_r2_w16",
    "checks/offsets": "moe_check_w1",
}


@pytest.mark.parametrize("name", NAMES)
def test_a_symbol_says_what_the_kernel_is(name):
    assert re.fullmatch(f"fusekit_{NAMES[name]}_[0-9a-f]{{8}}", symbol_of(find([name])[0]))


def test_kernels_that_share_a_cubin_share_the_symbol_and_no_others():
    device_specs = {}
    for spec in SPECS:
        assert re.fullmatch("fusekit_[a-z][a-z0-9_]{,60}", symbol_of(spec))
        device_specs.setdefault(symbol_of(spec), set()).add(canonical_json(spec.device_spec()))
    assert all(len(each) == 1 for each in device_specs.values())
    assert len(device_specs) < len(SPECS)


@pytest.mark.parametrize("spec", SPECS[::40], ids=lambda spec: spec.full_name)
def test_the_names_of_a_spec_are_not_in_its_symbol(spec):
    assert symbol_of(replace(spec, file="another", kernel="name", summary="Text.")) == symbol_of(spec)


def test_a_built_cubin_has_these_symbols_and_the_code_of_any(tmp_path):
    """Launches of one kernel and of two; ptxas makes other code of this one where its name lacks `cutlass`."""
    pytest.importorskip("cutlass", reason="the CuTe DSL (extra `build`) is not installed")
    from fusekit.compiler.trace import compile_plan
    from fusekit.compiler.worker import plan

    (bias,) = find(["gpt-oss-120b/moe.b2-grad"])
    (amax,) = parse_text(
        'schema = 1\n[[kernel]]\nname = "amax"\nop = "quantise"\narch = "sm_90a"\nout = "amax"\n', "amax"
    )
    for spec, launches in (
        (bias, [f"{symbol_of(bias)}_cutlass_0"]),
        (amax, [f"{symbol_of(amax)}_clear_cutlass_0", f"{symbol_of(amax)}_cutlass_1"]),
    ):
        compiled = compile_plan(plan(spec), tmp_path)
        assert [launch.symbol for launch in LaunchRecord.from_json(compiled.launch).launches] == launches
        assert sorted(cubins.kernels(compiled.cubin)) == sorted(launches)
        unnamed = compile_plan(replace(plan(spec), symbol=""), tmp_path)
        assert unnamed.launch["symbol"].startswith("kernel_cutlass_")
        assert code(compiled.cubin) == code(unnamed.cubin)


def code(cubin):
    """The machine code of the kernels in a cubin, sorted."""
    sections = cubins.parsed(cubin, "cubin").sections
    return sorted(section.data for section in sections if section.name.startswith(".text."))
