"""Bounds for how far results of two libraries may differ, which follow from types and lengths of sums, not from measurements.

u is the unit roundoff of a type: a result that is rounded once is off by at most u of its size. A sum of n terms is rounded n
times, in whatever order it is taken; so is what a sum is handed on to. Roundings are independent of each other and of
either sign, so that n of them in a row make sqrt(n) u, and not n u, with a probability that `DEVIATIONS` standard deviations
leave out (Higham and Mary, "A new approach to probabilistic rounding error analysis", SIAM J. Sci. Comput. 41, 2019). A
tensor is judged by its norm, in which the errors of its elements average out.

What is told by these bounds: an operation that is left out, a wrong factor, a term that is missing. What is not: an
operation whose effect is below the roundings of the rest; a test of that operation alone tells it, with shorter sums."""

import math

import torch

DEVIATIONS = 1  # standard deviations that a norm may be off, since it averages over elements
DEVIATIONS_OF_ONE = 6  # those that the worst of many elements, or a single number, may be off
ROUNDINGS_OF_A_LAYER = 16  # those of a layer's elementwise operations, forward and backward


def unit_roundoff(dtype):
    return torch.finfo(dtype).eps / 2


def of_roundings(count, dtype=torch.float32, deviations=DEVIATIONS_OF_ONE):
    """The relative error after so many roundings in a row."""
    return deviations * unit_roundoff(dtype) * math.sqrt(count)


def of_model(model, rows=64, dtype=None):
    """The relative error of a loss, or of the norm of a parameter's gradient, of a model that is given batches of `rows`
    tokens: all of its layers follow each other, forward and backward. A matrix sums over its inputs, its outputs and, in its
    gradient, the rows; so do attention (over rows) and norms (over their width). dtype: in which results are stored, where
    that is narrower than the narrowest parameter's, as under autocast; sums are taken in f32."""
    parameters = list(model.parameters())
    terms = stored = 0
    for p in (p for p in parameters if p.numel() > 0):
        if p.dim() > 1:
            terms += p.numel() // p.shape[0] + p.numel() // p.shape[1]
        else:
            terms += 2 * p.numel()
        terms += rows
        stored += ROUNDINGS_OF_A_LAYER
    stored_in = dtype or min((p.dtype for p in parameters), key=lambda each: -unit_roundoff(each))
    # A narrow type rounds what is stored, a quarter of the elementwise operations; the sums are in f32.
    narrow = 0.0 if stored_in == torch.float32 else of_roundings(stored / 4, stored_in, DEVIATIONS)
    return of_roundings(terms + stored, torch.float32, DEVIATIONS) + narrow


def of_losses(epsilon):
    """The relative error of losses in the course of training, where a gradient's is epsilon.

    Where an optimizer divides by the gradient's size (Adam), an element whose gradient is g goes astray by epsilon * rms /
    |g| of its step, which changes the loss by |g| times that: epsilon * rms, of the rms that the step is worth. So all steps
    together add epsilon of what the loss has fallen by, on either side, to the epsilon of the loss itself."""
    return 3 * epsilon


def of_changes(epsilon):
    """The relative error of what training changed of a tensor, by its norm: with Adam's division the elements with |g| <
    epsilon * rms, of which there are a share of epsilon, go anywhere (an error of up to 2), and the others, whose errors
    epsilon * rms / |g| are squared and added over a density that is even about 0, make as much again."""
    return 2 * math.sqrt(2 * epsilon)


def of_mean(epsilon, count):
    """The relative error of the mean of `count` values, each off by epsilon and by its square, the same for all."""
    return epsilon / math.sqrt(count) + epsilon**2


def near(found, expected, relative):
    """Whether numbers, one or several, differ from others by no more than a relative error."""
    if isinstance(found, (list, tuple)):
        return len(found) == len(expected) and all(near(a, b, relative) for a, b in zip(found, expected, strict=True))
    return found == expected or abs(found - expected) <= relative * abs(expected)


def _real(tensor):
    return (torch.view_as_real(tensor) if tensor.is_complex() else tensor).double()


def distance(found, expected):
    """The norm of the difference, in f64."""
    return (_real(found) - _real(expected)).norm().item()


def assert_near(found, expected, relative, terms=0.0, what=""):
    """By the norm. terms: the least size of the terms that an element is a sum of, where they may cancel."""
    assert found.shape == expected.shape and found.dtype == expected.dtype, what
    size = max(_real(expected).norm().item(), terms * math.sqrt(expected.numel()))
    off = distance(found, expected)
    assert off <= relative * size, f"{what} is off by {off / size:.3g} of its size; {relative:.3g} is allowed"


def assert_moved_alike(found, expected, start, epsilon, what=""):
    """Of a value that training moved from `start`. What it is stored in rounds it, too."""
    assert found.shape == expected.shape and found.dtype == expected.dtype, what
    moved, off = distance(expected, start), distance(found, expected)
    allowed = of_changes(epsilon) * moved + 2 * unit_roundoff(expected.dtype) * _real(expected).norm().item()
    assert off <= allowed, f"{what} is off by {off:.3g}, of {moved:.3g} that it moved; {allowed:.3g} is allowed"


def assert_updated_alike(found, expected, steps, step_size, what=""):
    """Element by element, of a value that an optimizer updated by the same gradients: some twenty roundings a step of
    what it holds and of what a step is worth, and at the end that of the type which it is stored in, which those may tip to
    the neighbour."""
    assert found.shape == expected.shape and found.dtype == expected.dtype, what
    size = expected.double().abs()
    allowed = of_roundings(20 * steps) * (size + step_size)
    if expected.dtype != torch.float32:
        allowed += 2 * unit_roundoff(expected.dtype) * size
    off = (found.double() - expected.double()).abs()
    worst = (off - allowed).argmax().item()
    assert (off <= allowed).all(), (
        f"{what}: element {worst} is off by {off.flatten()[worst]:.3g}; {allowed.flatten()[worst]:.3g} is allowed"
    )
