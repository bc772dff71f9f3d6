"""For networks so small that what surrounds the arithmetic takes longer than the arithmetic."""

import copy
import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.nn as nn
from torch.nn.utils import parameters_to_vector, vector_to_parameters


def clip(x: np.ndarray, low: Any, high: Any) -> np.ndarray:
    """`np.clip` takes several times as long for so few numbers."""
    return np.minimum(np.maximum(x, low), high)


def flatten(module: nn.Module) -> nn.Parameter:
    """Move all parameters into one tensor, which is returned; they and their gradients are views of it and its own from
    now on. Clipping and Adam take a fraction of the time that they take on a dozen small tensors.
    """
    parameters = list(module.parameters())
    flat = nn.Parameter(parameters_to_vector(parameters).detach())
    flat.grad = torch.zeros_like(flat)
    vector_to_parameters(flat.data, parameters)
    gradients = flat.grad.split([parameter.numel() for parameter in parameters])
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.grad = gradient.view_as(parameter)
    return flat


def in_numpy(network: nn.Sequential) -> Callable[[np.ndarray], np.ndarray]:
    """A copy of a network for a few rows at a time, `[N, D]` -> `[N, A]`, where torch's dispatch takes much longer than
    the arithmetic.
    """

    def step(layer: nn.Module) -> Callable[[np.ndarray], np.ndarray]:
        if isinstance(layer, nn.Linear):
            weight, bias = np.ascontiguousarray(layer.weight.numpy().T), layer.bias.numpy()
            return lambda x: x @ weight + bias
        return np.tanh if isinstance(layer, nn.Tanh) else lambda x: layer(torch.from_numpy(x)).numpy()

    steps = [step(layer) for layer in copy.deepcopy(network).cpu().requires_grad_(False)]
    return lambda x: functools.reduce(lambda x, step: step(x), steps, x)
