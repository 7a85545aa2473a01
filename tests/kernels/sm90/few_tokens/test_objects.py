"""The kernels of few tokens as they are compiled, and which configurations serve which calls. Needs no GPU."""

from __future__ import annotations

import dataclasses

import pytest

from tests.kernels.object_checks import ARCH, all_but_slow, check_object
from tsmla_kernels import object_cache
from tsmla_kernels.catalog import KERNELS
from tsmla_kernels.sm90.constants import FP8
from tsmla_kernels.sm90.few_tokens.config import (
    HALVES,
    MOST_TERMS,
    PACKED,
    REGISTERS,
    SIXTEEN,
    ChoiceSpec,
    ExpertsSpec,
    MatmulSpec,
    QueriesSpec,
    RouterSpec,
    WindowSpec,
    choice_reasons,
    experts_reasons,
    matmul_reasons,
    queries_reasons,
    router_reasons,
    window_reasons,
)
from tsmla_kernels.sm90.few_tokens.index_key_config import IndexKeySpec, index_key_reasons
from tsmla_kernels.sm90.few_tokens.latent_config import (
    InputsSpec,
    OutputsSpec,
    inputs_reasons,
    outputs_config,
    outputs_reasons,
)
from tsmla_kernels.sm90.few_tokens.streams_config import (
    ReadStreamsSpec,
    WriteStreamsSpec,
    read_streams_reasons,
    write_streams_reasons,
)
from tsmla_kernels.sm90.few_tokens.values_config import ValuesSpec, values_config, values_reasons

MATMUL = MatmulSpec(16, 7168, 2112, FP8, eps=1e-6)
EXPERTS = ExpertsSpec(16, 9, 7168, 2048, FP8, eps=1e-6)
QUERIES = QueriesSpec(16, 128, 128, 512, 64, "bfloat16", "bfloat16", True, "interleaved", 1e-6)
CHOICE = ChoiceSpec(7168, 2048, FP8, 256, 8, 1, "noaux_tc", "sigmoid", 8, 4, norm_topk_prob=True, eps=1e-6)
INDEX_KEY = IndexKeySpec(16, "bfloat16", rope_layout="halves")
ROUTER = RouterSpec(16, 7168, 256, 1e-6)
WINDOW = WindowSpec(16, 64, 1024, 1e-6, 1e-6)
INPUTS, OUTPUTS = InputsSpec(1, 4096, 1600, 64, (2048, 512)), OutputsSpec(1, 8, 4096, 1024)
VALUES = ValuesSpec(1, 16, 512, 128, 64, "float32", False)
WRITE_STREAMS, READ_STREAMS = WriteStreamsSpec(16, 4, 4096), ReadStreamsSpec(16, 4, 4096)
Spec = (
    MatmulSpec
    | ExpertsSpec
    | ChoiceSpec
    | QueriesSpec
    | RouterSpec
    | WindowSpec
    | IndexKeySpec
    | InputsSpec
    | OutputsSpec
    | ValuesSpec
    | WriteStreamsSpec
    | ReadStreamsSpec
)
CALLS: dict[str, tuple[str, Spec]] = {
    "matmul": ("few_token_matmul", MATMUL),
    "matmul gated": ("few_token_matmul", dataclasses.replace(MATMUL, gated=True)),
    "matmul of bf16": ("few_token_matmul", dataclasses.replace(MATMUL, weight_dtype="bfloat16")),
    "matmul residual": ("few_token_matmul", dataclasses.replace(MATMUL, eps=None, residual=True)),
    "matmul 1 token": ("few_token_matmul", dataclasses.replace(MATMUL, tokens=1)),
    "matmul 1 token residual": ("few_token_matmul", dataclasses.replace(MATMUL, tokens=1, eps=None, residual=True)),
    "matmul 1 token of few rows": ("few_token_matmul", MatmulSpec(1, 7168, 128, "bfloat16", eps=1e-6)),
    "matmul 1 token gated of bf16": ("few_token_matmul", MatmulSpec(1, 2048, 21888, "bfloat16", eps=1e-6, gated=True)),
    "matmul 1 token of bf16": ("few_token_matmul", MatmulSpec(1, 8192, 4096, "bfloat16")),
    "matmul 1 token gated": ("few_token_matmul", dataclasses.replace(MATMUL, tokens=1, gated=True)),
    "up": ("few_token_experts_up", EXPERTS),
    "up of bf16": ("few_token_experts_up", dataclasses.replace(EXPERTS, weight_dtype="bfloat16", limit=10.0)),
    "up 1 token": ("few_token_experts_up", dataclasses.replace(EXPERTS, tokens=1)),
    "down": ("few_token_experts_down", dataclasses.replace(EXPERTS, eps=None)),
    "down of bf16": ("few_token_experts_down", dataclasses.replace(EXPERTS, eps=None, weight_dtype="bfloat16")),
    "down 1 token": ("few_token_experts_down", dataclasses.replace(EXPERTS, eps=None, tokens=1)),
    "down 1 token of bf16": ("few_token_experts_down", ExpertsSpec(1, 8, 2048, 1408, "bfloat16", residual=False)),
    "choose up": ("few_token_choose_up", CHOICE),
    "choose up, down ahead": ("few_token_choose_up", dataclasses.replace(CHOICE, ahead=True)),
    "choose up of bf16": ("few_token_choose_up", ChoiceSpec(2048, 1408, "bfloat16", 64, 6, 2, eps=1e-6)),
    "queries": ("few_token_queries", QUERIES),
    "queries of fp8": ("few_token_queries", dataclasses.replace(QUERIES, q_dtype=FP8, kv_dtype=FP8)),
    "queries of packed rows": ("few_token_queries", dataclasses.replace(QUERIES, kv_dtype=PACKED)),
    "index key": ("few_token_index_key", INDEX_KEY),
    "window": ("few_token_window", WINDOW),
    "inputs": ("few_token_inputs", INPUTS),
    "inputs without tail": ("few_token_inputs", InputsSpec(1, 4096, 1536, 0, (1024,))),
    "outputs": ("few_token_outputs", OUTPUTS),
    "values": ("few_token_values", VALUES),
    "values of many heads": ("few_token_values", ValuesSpec(1, 128, 512, 128, 128, "float16", True)),
    "write streams": ("few_token_write_streams", WRITE_STREAMS),
    "project streams": ("few_token_write_streams", dataclasses.replace(WRITE_STREAMS, written=False)),
    "read streams": ("few_token_read_streams", READ_STREAMS),
    "close streams": ("few_token_read_streams", dataclasses.replace(READ_STREAMS, tokens=1, mixes=False)),
    "router": ("few_token_router", ROUTER),
    "router 1 token": ("few_token_router", dataclasses.replace(ROUTER, tokens=1)),
}
FAST = (
    "matmul", "down", "index key", "matmul 1 token", "choose up of bf16", "down 1 token", "write streams",
    "read streams", "inputs", "outputs", "values",
)  # fmt: skip


@pytest.mark.parametrize("name", all_but_slow(CALLS, FAST))
def test_everything_stays_in_registers(name: str) -> None:
    """Two CTAs find room on a multiprocessor, so that the next kernel starts beside this one."""
    kernel, spec = KERNELS[CALLS[name][0]], CALLS[name][1]
    assert kernel.reasons(spec) == []
    most = 255 if name == "router" else 128
    check_object(object_cache.load_or_compile(kernel, kernel.config_for(spec), ARCH), kernels=1, registers=most)


def test_what_the_kernels_refuse() -> None:
    refused: list[tuple[list[str], str]] = [
        (matmul_reasons(dataclasses.replace(MATMUL, tokens=17)), "there are 17 tokens"),
        (matmul_reasons(dataclasses.replace(MATMUL, tokens=0)), "there are 0 tokens"),
        (matmul_reasons(dataclasses.replace(MATMUL, terms=7168 + 64)), "has 7232 terms"),
        (matmul_reasons(dataclasses.replace(MATMUL, rows=20)), "has 20 rows"),
        (matmul_reasons(dataclasses.replace(MATMUL, rows=24, gated=True)), "has 24 rows; the kernels of few tokens take"
         " multiples of 16"),
        (matmul_reasons(dataclasses.replace(MATMUL, weight_dtype="float16")), "weight.dtype is float16"),
        (experts_reasons(dataclasses.replace(EXPERTS, width=1408 + 8)), "an expert is 1416 wide"),
        (experts_reasons(dataclasses.replace(EXPERTS, choices=17)), "a token has 17 experts"),
        (choice_reasons(dataclasses.replace(CHOICE, num_experts=600, n_group=1)), "there are 600 experts"),
        (choice_reasons(dataclasses.replace(CHOICE, scoring="tanh")), "scoring is tanh"),
        (choice_reasons(dataclasses.replace(CHOICE, num_experts=96, n_group=5)), "96 experts are in 5 groups"),
        (queries_reasons(dataclasses.replace(QUERIES, nope_dim=64)), "a head has 64 columns without rope"),
        (queries_reasons(dataclasses.replace(QUERIES, latent_dim=576)), "a latent has 576 columns"),
        (queries_reasons(dataclasses.replace(QUERIES, rope_dim=0)), "0 columns have rope"),
        (queries_reasons(dataclasses.replace(QUERIES, kv_dtype="float16")), "kv_cache.dtype is float16"),
        (queries_reasons(dataclasses.replace(QUERIES, kv_dtype=PACKED, latent_dim=256)), "packed rows have 512 latent"),
        (index_key_reasons(dataclasses.replace(INDEX_KEY, tokens=17)), "there are 17 tokens"),
        (index_key_reasons(dataclasses.replace(INDEX_KEY, rope_dim=24)), "24 columns have rope"),
        (index_key_reasons(dataclasses.replace(INDEX_KEY, norm_dtype="float16")), "norm.weight.dtype is float16"),
        (router_reasons(dataclasses.replace(ROUTER, terms=100)), "the router has 100 columns"),
        (window_reasons(dataclasses.replace(WINDOW, rank=1152)), "the query's low rank is 1152"),
        (inputs_reasons(dataclasses.replace(INPUTS, tokens=2)), "there are 2 tokens"),
        (inputs_reasons(dataclasses.replace(INPUTS, terms=4224)), "a weight has 4224 terms"),
        (inputs_reasons(dataclasses.replace(INPUTS, tail=20, rows=1556)), "a result has 20 columns"),
        (inputs_reasons(dataclasses.replace(INPUTS, pooled=())), "there are 0 weights of compressors"),
        (outputs_reasons(dataclasses.replace(OUTPUTS, terms=4352)), "a group has 4352 terms of heads of 512"),
        (outputs_reasons(dataclasses.replace(OUTPUTS, rope_dim=36)), "36 columns have rope"),
        (outputs_reasons(dataclasses.replace(OUTPUTS, rows=1020)), "a group has 1020 weight rows"),
        (values_reasons(dataclasses.replace(VALUES, tokens=2)), "there are 2 tokens"),
        (values_reasons(dataclasses.replace(VALUES, heads=65)), "there are 65 heads in tiles of 64"),
        (values_reasons(dataclasses.replace(VALUES, latent_dim=256)), "latents have 256 columns"),
        (values_reasons(dataclasses.replace(VALUES, rows=12)), "W_UV has 12 rows"),
        (write_streams_reasons(dataclasses.replace(WRITE_STREAMS, count=5)), "there are 5 streams"),
        (read_streams_reasons(dataclasses.replace(READ_STREAMS, columns=4080)), "a stream has 4080 columns"),
    ]  # fmt: skip
    for found, message in refused:
        assert len(found) == 1 and message in found[0]


def test_tokens_share_an_object() -> None:
    configs = {KERNELS["few_token_matmul"].config_for(dataclasses.replace(MATMUL, tokens=t)) for t in range(1, 17)}
    assert {(config.form, config.token_tiles) for config in configs} == {(HALVES, 1), (REGISTERS, 1), (REGISTERS, 2)}


def test_the_form_of_one_token() -> None:
    """Halves of long rows are multiplied at once, unless gated. Registers take what has no room beside the ring."""

    def form(name: str, spec: MatmulSpec | ExpertsSpec) -> str:
        return str(KERNELS[name].config_for(dataclasses.replace(spec, tokens=1)).form)

    for changes, expected in (
        ({}, HALVES), ({"gated": True}, SIXTEEN), ({"terms": 7040}, SIXTEEN), ({"terms": 1536}, SIXTEEN),
        ({"weight_dtype": "bfloat16"}, REGISTERS),
        ({"weight_dtype": "bfloat16", "rows": 7168}, HALVES), ({"weight_dtype": "bfloat16", "rows": 128}, HALVES),
        ({"weight_dtype": "bfloat16", "rows": 128, "terms": 2048}, REGISTERS), ({"terms": 12416}, REGISTERS),
        ({"terms": 12416, "eps": None}, SIXTEEN), ({"terms": MOST_TERMS + 128, "eps": None}, REGISTERS),
    ):  # fmt: skip
        assert form("few_token_matmul", dataclasses.replace(MATMUL, **changes)) == expected
    assert form("few_token_experts_down", EXPERTS) == HALVES
    assert form("few_token_experts_down", dataclasses.replace(EXPERTS, choices=10)) == REGISTERS
    assert form("few_token_experts_up", EXPERTS) == REGISTERS
    assert [values_config(dataclasses.replace(VALUES, heads=heads)).rows for heads in (8, 16, 64, 128)] == [
        8,
        16,
        64,
        128,
    ]
    assert [outputs_config(dataclasses.replace(OUTPUTS, groups=groups)).tiles for groups in (1, 8, 16)] == [1, 8, 16]
    choice = KERNELS["few_token_choose_up"]
    assert [choice.config_for(dataclasses.replace(CHOICE, hidden=h)).form for h in (7168, 20480)] == [
        SIXTEEN,
        REGISTERS,
    ]
    configs = {KERNELS["few_token_router"].config_for(dataclasses.replace(ROUTER, tokens=t)) for t in range(1, 17)}
    assert {config.tokens for config in configs} == {1, 2, 4, 8, 16}
