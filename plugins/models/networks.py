"""The papers' networks, each a function from input shape and number of classes to blocks and a classifier."""

from __future__ import annotations

from math import prod

from plugins.core.errors import UserError
from plugins.models.layers import BatchNorm, Block, Conv, Flatten, Linear, MaxPool, Output, ReLU, Stacked

Shape = tuple[int, ...]  # of one sample: (channels, height, width)


def logistic_regression(shape: Shape, n_classes: int) -> Stacked:
    """One linear layer on the pixels; its "features" are the pixels."""
    return Stacked("logistic_regression", (Flatten(),), Linear("fc", prod(shape), n_classes))


def mlp(shape: Shape, n_classes: int, hidden: int = 64, batch_norm: bool = False, projection: int = 0) -> Stacked:
    """pixels - hidden - classes with ReLU; `batch_norm` normalises the hidden layer before its ReLU."""
    blocks: list[Block] = [Flatten(), Linear("fc1", prod(shape), hidden)]
    if batch_norm:
        blocks.append(BatchNorm("bn1", hidden))
    head, size = _projection(hidden, projection)
    return Stacked("mlp", (*blocks, ReLU("fc1"), *head), Linear("fc2", size, n_classes))


def cnn(
    shape: Shape, n_classes: int, channels: int = 32, hidden: int = 512, batch_norm: bool = False, projection: int = 0
) -> Stacked:
    """rFedAvg's CNN (Section VI-A, after McMahan et al. 2017), phi = the 512 features before the classifier.

    conv5 pad2 32, ReLU, pool, conv5 pad2 64, ReLU, pool, 512, ReLU, classes: 1,663,370 parameters on MNIST,
    1,664,970 on CIFAR-10 resized to 28x28. Without padding the paper's 3136-512 layer would not fit.
    """
    depth, height, width = _image("cnn", shape, 4)
    size = 2 * channels * (height // 4) * (width // 4)

    def conv(name: str, n_in: int, n_out: int) -> list[Block]:
        norm: list[Block] = [BatchNorm(f"{name}_bn", n_out)] if batch_norm else []
        return [Conv(name, n_in, n_out, 5, padding=2), *norm, ReLU(name), MaxPool()]

    blocks = (*conv("conv1", depth, channels), *conv("conv2", channels, 2 * channels), Flatten())
    head, width_out = _projection(hidden, projection)
    return Stacked(
        "cnn", (*blocks, Linear("fc1", size, hidden), ReLU("fc1"), *head), Linear("fc2", width_out, n_classes)
    )


def _projection(size: int, width: int) -> tuple[list[Block], int]:
    """(blocks, size of what they put out): MOON's projection head (Li, He, Song 2021) before the classifier.

    size - size - `width` with a ReLU between; nothing for width 0. Contrast and classifier both read its output.
    """
    if not width:
        return [], size
    first, second = Linear("projection1", size, size), Linear("projection2", size, width)
    return [first, ReLU("projection1"), second, Output("projection2")], width


def _image(model: str, shape: Shape, smallest: int) -> tuple[int, int, int]:
    if len(shape) != 3 or min(shape[1:]) < smallest:
        raise UserError(
            f"model {model!r} needs images (channels, height, width) of at least {smallest}x{smallest}, got {shape}"
        )
    return shape[0], shape[1], shape[2]
