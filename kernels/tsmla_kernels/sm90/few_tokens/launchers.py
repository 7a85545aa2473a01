"""Which launcher a config of few_token_matmul, few_token_choose_up or few_token_experts_down takes."""

from __future__ import annotations

from tsmla_kernels.sm90.few_tokens.choose_up import FewTokenChooseUp
from tsmla_kernels.sm90.few_tokens.config import REGISTERS, ChoiceConfig, ExpertsConfig, MatmulConfig
from tsmla_kernels.sm90.few_tokens.experts_down import FewTokenExpertsDown
from tsmla_kernels.sm90.few_tokens.matmul import FewTokenMatmul
from tsmla_kernels.sm90.few_tokens.one_token_choose_up import OneTokenChooseUp
from tsmla_kernels.sm90.few_tokens.one_token_experts_down import OneTokenExpertsDown
from tsmla_kernels.sm90.few_tokens.one_token_matmul import OneTokenMatmul


def matmul(config: MatmulConfig) -> FewTokenMatmul | OneTokenMatmul:
    """The launcher of few_token_matmul."""
    return FewTokenMatmul(config) if config.form == REGISTERS else OneTokenMatmul(config)


def choose_up(config: ChoiceConfig) -> FewTokenChooseUp | OneTokenChooseUp:
    """The launcher of few_token_choose_up."""
    return FewTokenChooseUp(config) if config.form == REGISTERS else OneTokenChooseUp(config)


def experts_down(config: ExpertsConfig) -> FewTokenExpertsDown | OneTokenExpertsDown:
    """The launcher of few_token_experts_down."""
    return FewTokenExpertsDown(config) if config.form == REGISTERS else OneTokenExpertsDown(config)
