"""Blocks that mix features: Wukong Turbo, cross layers, dot products and MLPs, each at the rows of its side."""

from torchrec_adaptive.interaction.cross_network import LowRankCrossNetwork
from torchrec_adaptive.interaction.dot_interaction import DotInteraction
from torchrec_adaptive.interaction.mlp import BroadcastLinear, BroadcastMLP, make_mlp
from torchrec_adaptive.interaction.wukong_turbo import (
    FactorizationMachineBlock,
    LinearCompressionBlock,
    Norm,
    WukongTurboBlock,
    WukongTurboBlockConfig,
    WukongTurboStack,
    make_norm,
)

__all__ = [
    "BroadcastLinear",
    "BroadcastMLP",
    "DotInteraction",
    "FactorizationMachineBlock",
    "LinearCompressionBlock",
    "LowRankCrossNetwork",
    "Norm",
    "WukongTurboBlock",
    "WukongTurboBlockConfig",
    "WukongTurboStack",
    "make_mlp",
    "make_norm",
]
