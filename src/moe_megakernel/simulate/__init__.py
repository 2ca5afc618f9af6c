"""A discrete-event simulation of the layer's task stream on several GPUs: time, exposed communication, time line."""

from .layer import Layer, simulate
from .options import DIRECTIONS, DTYPES, ORDERS, TRANSPORTS, Options, SimulateError, make_options

__all__ = [
    "DIRECTIONS",
    "DTYPES",
    "ORDERS",
    "TRANSPORTS",
    "Layer",
    "Options",
    "SimulateError",
    "make_options",
    "simulate",
]
