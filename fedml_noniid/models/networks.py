"""The papers' networks, each a function from input shape and number of classes to blocks and a
classifier."""

from __future__ import annotations

from math import prod

from fedml_noniid.core.errors import UserError
from fedml_noniid.core.options import Width, WidthOrNone
from fedml_noniid.models.initial import (
    Initial,
    as_torch,
    kaiming_normal_out,
    kaiming_uniform,
    xavier_normal,
    xavier_uniform,
)
from fedml_noniid.models.layers import (
    BatchNorm,
    Block,
    Conv,
    Dropout,
    Flatten,
    GlobalAverage,
    Linear,
    MaxPool,
    Output,
    ReLU,
    Residual,
)
from fedml_noniid.models.stacked import Stacked

Shape = tuple[int, ...]  # of one sample: (channels, height, width)
POOL = 0  # in a row of convolutions, each given by its channels


def logistic_regression(shape: Shape, n_classes: int) -> Stacked:
    """One linear layer on the pixels; its "features" are the pixels."""
    return Stacked("logistic_regression", (Flatten(),), Linear("fc", prod(shape), n_classes))


def mlp(
    shape: Shape,
    n_classes: int,
    *,
    hidden: Width = 64,
    batch_norm: bool = False,
    projection: WidthOrNone = 0,
) -> Stacked:
    """pixels - hidden - classes with ReLU; `batch_norm` normalises the hidden layer before its
    ReLU."""
    blocks: list[Block] = [Flatten(), Linear("fc1", prod(shape), hidden)]
    if batch_norm:
        blocks.append(BatchNorm("bn1", hidden))
    head, size = _projection(hidden, projection)
    return Stacked("mlp", (*blocks, ReLU("fc1"), *head), Linear("fc2", size, n_classes))


def cnn(
    shape: Shape,
    n_classes: int,
    *,
    channels: Width = 32,
    hidden: Width = 512,
    batch_norm: bool = False,
    projection: WidthOrNone = 0,
) -> Stacked:
    """rFedAvg's CNN (Section VI-A, after McMahan et al.

    2017), phi = the 512 features before the classifier.

    conv5 pad2 32, ReLU, pool, conv5 pad2 64, ReLU, pool, 512, ReLU, classes: 1,663,370 parameters
    on MNIST, 1,664,970 on CIFAR-10 resized to 28x28. Without padding the paper's 3136-512 layer
    would not fit.
    """
    depth, height, width = _image("cnn", shape, 4)
    size = 2 * channels * (height // 4) * (width // 4)

    def conv(name: str, n_in: int, n_out: int) -> list[Block]:
        norm: list[Block] = [BatchNorm(f"{name}_bn", n_out)] if batch_norm else []
        return [Conv(name, n_in, n_out, 5, padding=2), *norm, ReLU(name), MaxPool()]

    blocks = (*conv("conv1", depth, channels), *conv("conv2", channels, 2 * channels), Flatten())
    head, width_out = _projection(hidden, projection)
    return Stacked(
        "cnn",
        (*blocks, Linear("fc1", size, hidden), ReLU("fc1"), *head),
        Linear("fc2", width_out, n_classes),
    )


def fednnnn_mnist(shape: Shape, n_classes: int) -> Stacked:
    """FedNNNN's network for MNIST: 431,080 parameters.

    conv5 20, ReLU, pool, conv5 50, ReLU, pool, 800-500, ReLU, classes.
    """
    depth = _image_of("fednnnn_mnist", shape, 28, "its 800-500 layer")
    blocks = (
        *(Conv("conv1", depth, 20, 5), ReLU("conv1"), MaxPool()),
        *(Conv("conv2", 20, 50, 5), ReLU("conv2"), MaxPool()),
        *(Flatten(), Linear("fc1", 800, 500), ReLU("fc1")),
    )
    return Stacked("fednnnn_mnist", blocks, Linear("fc2", 500, n_classes))


def fednnnn_cifar(shape: Shape, n_classes: int) -> Stacked:
    """FedNNNN's network for CIFAR-10: 1,146,088 parameters, the batch norms' affine pairs among
    them.

    [conv3 pad1, BN, ReLU] twice with 32, with 64, with 128 channels, a pool behind each two,
    2048-382-192-classes.
    """
    depth = _image_of("fednnnn_cifar", shape, 32, "its 2048-382 layer")
    convs, _ = _convolutions(depth, (32, 32, POOL, 64, 64, POOL, 128, 128, POOL), batch_norm=True)
    dense = (Linear("fc1", 2048, 382), ReLU("fc1"), Linear("fc2", 382, 192), ReLU("fc2"))
    return Stacked("fednnnn_cifar", (*convs, Flatten(), *dense), Linear("fc3", 192, n_classes))


def vgg9(shape: Shape, n_classes: int, *, dropout: bool = True) -> Stacked:
    """FedNLR's VGG-9, which is the "moderate" CNN of FedMA and NIID-Bench: 3,491,530 parameters for
    10 classes.

    conv3 pad1 32, 64, pool, 128, 128, pool, 256, 256, pool, each with ReLU; 4096-512-512-classes.
    Dropout of channels (0.05) behind the second pool, of numbers (0.1) before the first and the
    last dense layer: NIID-Bench's, FedNLR does not mention it. Convolutions start Kaiming-uniform,
    dense layers Xavier-normal.
    """
    depth = _image_of("vgg9", shape, 32, "its 4096-512 layer")
    first, channels = _convolutions(depth, (32, 64, POOL, 128, 128, POOL), initial=kaiming_uniform)
    second, _ = _convolutions(channels, (256, 256, POOL), initial=kaiming_uniform, n_before=4)
    fc1, fc2 = Linear("fc1", 4096, 512, xavier_normal), Linear("fc2", 512, 512, xavier_normal)
    blocks: tuple[Block, ...] = (
        *(*first, Dropout(1, 0.05, channels=True), *second, Flatten(), Dropout(2, 0.1)),
        *(fc1, ReLU("fc1"), fc2, ReLU("fc2"), Dropout(3, 0.1)),
    )
    return Stacked("vgg9", _without(blocks, dropout), Linear("fc3", 512, n_classes, xavier_normal))


# Configurations A and D of Simonyan and Zisserman 2015.
VGG_11 = (64, POOL, 128, POOL, 256, 256, POOL, 512, 512, POOL, 512, 512, POOL)
VGG_16 = (
    64,
    64,
    POOL,
    128,
    128,
    POOL,
    256,
    256,
    256,
    POOL,
    512,
    512,
    512,
    POOL,
    512,
    512,
    512,
    POOL,
)


def vgg11(shape: Shape, n_classes: int, *, dropout: bool = True) -> Stacked:
    """FNR-FL's VGG-11, which is NIID-Bench's: the convolutions of configuration A with bias,
    without batch norm.

    Dropout (0.5), 512-512, ReLU, dropout (0.5), 512-512, ReLU, classes. Convolutions start normal
    with variance 2 / fan out and bias 0, as in NIID-Bench.
    """
    depth = _image_of("vgg11", shape, 32, "its 512-512 layer")
    convs, _ = _convolutions(depth, VGG_11, initial=kaiming_normal_out)
    fc1, fc2 = Linear("fc1", 512, 512), Linear("fc2", 512, 512)
    blocks: tuple[Block, ...] = (
        *(*convs, Flatten(), Dropout(1, 0.5), fc1, ReLU("fc1")),
        *(Dropout(2, 0.5), fc2, ReLU("fc2")),
    )
    return Stacked("vgg11", _without(blocks, dropout), Linear("fc3", 512, n_classes))


def vgg16(shape: Shape, n_classes: int, *, batch_norm: bool = True) -> Stacked:
    """CCN's VGG-16: 13 convolutions (configuration D), 512-128, ReLU, classes.

    The paper names the 128 only. Ours: batch norm behind each convolution, and the mean over
    positions before the 128.
    """
    depth, _, _ = _image("vgg16", shape, 32)
    convs, channels = _convolutions(depth, VGG_16, batch_norm)
    blocks = (*convs, GlobalAverage(), Linear("fc1", channels, 128), ReLU("fc1"))
    return Stacked("vgg16", blocks, Linear("fc2", 128, n_classes))


def resnet18(shape: Shape, n_classes: int) -> Stacked:
    """FNR-FL's ResNet-18 (He, Zhang, Ren, Sun 2016) for small images: 11,173,962 parameters on
    CIFAR-10.

    conv3 pad1 64 without the max pool, then two residual blocks each of 64, 128, 256, 512 channels;
    the first of the last three halves the image, and its shortcut is a 1x1 convolution with batch
    norm. Convolutions have no bias. The features are the means over positions.
    """
    depth, _, _ = _image("resnet18", shape, 8)
    blocks: list[Block] = [*_normalised("conv1", depth, 64, 3), ReLU("conv1")]
    n_in = 64
    for stage, n_out in enumerate((64, 128, 256, 512), start=1):
        for index in (1, 2):
            name, stride = f"block{stage}_{index}", 2 if stage > 1 and index == 1 else 1
            first, second, skip = f"{name}_conv1", f"{name}_conv2", f"{name}_shortcut"
            body = (
                *_normalised(first, n_in, n_out, 3, stride),
                ReLU(first),
                *_normalised(second, n_out, n_out, 3),
            )
            shortcut = (
                (*_normalised(skip, n_in, n_out, 1, stride), Output(skip)) if stride > 1 else ()
            )
            blocks.append(Residual(second, body, shortcut))
            n_in = n_out
    return Stacked("resnet18", (*blocks, GlobalAverage()), Linear("fc", n_in, n_classes))


def pfl_cnn(shape: Shape, n_classes: int, *, dropout: bool = True) -> Stacked:
    """pfl-research's `simple_cnn` (Granqvist et al.

    2024) of its CIFAR-10 benchmark, to compare speeds.

    conv3 32, ReLU, conv3 64, ReLU, pool, dropout (0.25), 128, ReLU, dropout (0.5), classes; weights
    Xavier-uniform.
    """
    depth, height, width = _image("pfl_cnn", shape, 6)
    size = 64 * ((height - 4) // 2) * ((width - 4) // 2)
    blocks: tuple[Block, ...] = (
        *(Conv("conv1", depth, 32, 3, initial=xavier_uniform), ReLU("conv1")),
        *(
            Conv("conv2", 32, 64, 3, initial=xavier_uniform),
            ReLU("conv2"),
            MaxPool(),
            Dropout(1, 0.25),
        ),
        *(Flatten(), Linear("fc1", size, 128, xavier_uniform), ReLU("fc1"), Dropout(2, 0.5)),
    )
    return Stacked(
        "pfl_cnn", _without(blocks, dropout), Linear("fc2", 128, n_classes, xavier_uniform)
    )


def _convolutions(
    n_in: int,
    plan: tuple[int, ...],
    batch_norm: bool = False,
    initial: Initial = as_torch,
    n_before: int = 0,
) -> tuple[list[Block], int]:
    """(blocks, channels that they put out): conv3 pad1 and ReLU for each number of channels, a pool
    for each POOL.

    `n_before`: convolutions that the network has before these.
    """
    blocks: list[Block] = []
    for n_out in plan:
        if n_out == POOL:
            blocks.append(MaxPool())
            continue
        n_before += 1
        name = f"conv{n_before}"
        blocks.append(Conv(name, n_in, n_out, 3, padding=1, initial=initial))
        if batch_norm:
            blocks.append(BatchNorm(f"{name}_bn", n_out))
        blocks.append(ReLU(name))
        n_in = n_out
    return blocks, n_in


def _normalised(
    name: str, n_in: int, n_out: int, kernel: int, stride: int = 1
) -> tuple[Block, Block]:
    """A convolution without bias that keeps the image's size or, with its stride, divides it; and
    its batch norm."""
    return Conv(name, n_in, n_out, kernel, kernel // 2, stride, bias=False), BatchNorm(
        f"{name}_bn", n_out
    )


def _without(blocks: tuple[Block, ...], dropout: bool) -> tuple[Block, ...]:
    """The blocks as they are, or without those of dropout."""
    return tuple(block for block in blocks if dropout or not isinstance(block, Dropout))


def _projection(size: int, width: int) -> tuple[list[Block], int]:
    """(blocks, size of what they put out): MOON's projection head (Li, He, Song 2021) before the
    classifier.

    size - size - `width` with a ReLU between; nothing for width 0. Contrast and classifier both
    read its output.
    """
    if not width:
        return [], size
    first, second = Linear("projection1", size, size), Linear("projection2", size, width)
    return [first, ReLU("projection1"), second, Output("projection2")], width


def _image(model: str, shape: Shape, smallest: int) -> tuple[int, int, int]:
    if len(shape) != 3 or min(shape[1:]) < smallest:
        raise UserError(
            f"model {model!r} needs images (channels, height, width) of at least "
            f"{smallest}x{smallest}, got {shape}"
        )
    return shape[0], shape[1], shape[2]


def _image_of(model: str, shape: Shape, side: int, why: str) -> int:
    """The channels of a sample of the one size that the model takes."""
    if len(shape) != 3 or shape[1:] != (side, side):
        raise UserError(
            f"model {model!r} needs images of {side}x{side}, which {why} fits, got {shape}"
        )
    return shape[0]
