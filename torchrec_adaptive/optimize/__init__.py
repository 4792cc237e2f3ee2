"""Transformations of models that exist already."""

from torchrec_adaptive.optimize.report import Operator, RequestOrientReport
from torchrec_adaptive.optimize.request_orient import RequestOriented, request_orient

__all__ = ["Operator", "RequestOrientReport", "RequestOriented", "request_orient"]
