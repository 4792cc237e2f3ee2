"""Blocks that mix features: Wukong Turbo."""

from torchrec_adaptive.interaction.wukong_turbo import (
    FactorizationMachineBlock,
    LinearCompressionBlock,
    WukongTurboBlock,
    WukongTurboBlockConfig,
    WukongTurboStack,
    make_mlp,
    make_norm,
)

__all__ = [
    "FactorizationMachineBlock",
    "LinearCompressionBlock",
    "WukongTurboBlock",
    "WukongTurboBlockConfig",
    "WukongTurboStack",
    "make_mlp",
    "make_norm",
]
