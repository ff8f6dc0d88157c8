"""N:M patterns: what a block is, which weights stay, and the memory tricks that must not change either."""

from __future__ import annotations

import math
from fractions import Fraction

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from bame_cli.errors import ConfigError
from bame_cli.sparsity import pattern as pattern_module
from bame_cli.sparsity.pattern import Pattern, Picked, keep_largest, keep_where, lowest, zero_where_
from bame_cli.tasks.images import models

SEVERAL = settings(max_examples=80, deadline=None)
# Few distinct values, so that most blocks have ties; both signs and both zeros, since only |w| counts.
PALETTE = torch.tensor([0.0, -0.0, 1.0, -1.0, 2.0, -2.0, 0.5, math.inf, -math.inf])


def naive_mask(weight: Tensor, n: int, m: int) -> Tensor:
    """The definition in plain Python: per output and kernel position, per M inputs, a stable sort by |w|."""
    mask = torch.zeros(weight.shape, dtype=torch.bool)
    flat, flat_mask = weight.reshape(*weight.shape[:2], -1), mask.view(*weight.shape[:2], -1)
    for o in range(flat.shape[0]):
        for position in range(flat.shape[2]):
            row = [abs(float(w)) for w in flat[o, :, position]]
            for start in range(0, len(row), m):
                for i in sorted(range(start, start + m), key=lambda i: -row[i])[:n]:
                    flat_mask[o, i, position] = True
    return mask


def kept_per_block(mask: Tensor, m: int) -> Tensor:
    """Kept weights of every block, by the layout that sparse tensor cores read: (O, kh, kw, I), rows of M."""
    inputs_last = mask.permute(0, 2, 3, 1) if mask.dim() == 4 else mask
    return inputs_last.reshape(-1, m).sum(1)


@st.composite
def weights(draw: st.DrawFn) -> tuple[Pattern, Tensor]:
    """Any pattern with a Linear or Conv2d weight that fits it: generic values, values full of ties, or a mixture."""
    m = draw(st.integers(1, 12))  # both sides of the size where the algorithm changes
    n = draw(st.integers(1, m))
    kernel = draw(st.sampled_from([(), (1, 1), (3, 3), (1, 2), (2, 3)]))
    shape = (draw(st.integers(1, 4)), m * draw(st.integers(1, 3)), *kernel)
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**16)))
    tied = PALETTE[torch.randint(draw(st.integers(1, len(PALETTE))), shape, generator=generator)]
    generic = torch.randn(shape, generator=generator)
    share = draw(st.sampled_from([0.0, 0.5, 1.0]))
    return Pattern(n, m), torch.where(torch.rand(shape, generator=generator) < share, generic, tied)


# --- the pattern itself ---


@pytest.mark.parametrize(("text", "n", "m"), [("2:4", 2, 4), (" 1:16 ", 1, 16), ("1:1", 1, 1), ("31:64", 31, 64)])
def test_parse(text, n, m):
    """N is what is kept: some libraries count the zeros instead."""
    pattern = Pattern.parse(text)
    assert (pattern.n, pattern.m) == (n, m)
    assert (str(pattern), pattern.slug, pattern.density) == (f"{n}:{m}", f"{n}of{m}", Fraction(n, m))


@pytest.mark.parametrize(
    "text", ["4:2", "0:4", "0:0", "abc", "", "2:", ":4", "2", "-1:4", "2:-4", "5:4", "2:4:8", "2.0:4", "2 : 4"]
)
def test_parse_refuses_with_the_rule_and_an_example(text):
    with pytest.raises(ConfigError, match=r"1 <= N <= M.*for example 2:4") as error:
        Pattern.parse(text)
    assert text in str(error.value)


def test_only_multiples_of_m_have_blocks():
    pattern = Pattern(2, 4)
    assert pattern.fits((3, 8, 3, 3))
    assert not pattern.fits((8, 6))
    assert not pattern.fits((8,))
    assert pattern.num_blocks((3, 8, 3, 3)) == 3 * 2 * 9
    with pytest.raises(ValueError, match="blocks of 4"):
        pattern.project(torch.randn(8, 6))


# --- projection ---


@SEVERAL
@given(weights())
def test_projection_is_the_definition(case):
    """Exactly N per block whatever the values, inside one output and one kernel position, ties to the lowest index."""
    pattern, weight = case
    mask = pattern.project(weight)
    assert mask.dtype == torch.bool
    assert kept_per_block(mask, pattern.m).eq(pattern.n).all()
    assert mask.equal(naive_mask(weight, pattern.n, pattern.m))
    assert pattern.check(weight * mask if weight.isfinite().all() else mask) is None


@SEVERAL
@given(weights())
def test_memory_format_changes_nothing(case):
    pattern, weight = case
    strided = weight.to(memory_format=torch.channels_last) if weight.dim() == 4 else weight.t().contiguous().t()
    assert pattern.project(strided).equal(pattern.project(weight))
    out = torch.ones_like(weight, dtype=torch.bool)  # stale content, and another layout than the weight's
    assert pattern.project(strided, out=out) is out
    assert out.equal(pattern.project(weight))


@SEVERAL
@given(weights(), st.integers(1, 100))
def test_chunks_change_nothing(case, chunk):
    """Large layers are projected a few rows at a time; only some chunks then hold ties."""
    pattern, weight = case
    whole = pattern.project(weight)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pattern_module, "_CHUNK", chunk)
        assert pattern.project(weight).equal(whole)


def test_a_layer_of_several_chunks_at_the_real_size():
    weight = torch.randn(1025, 2048, generator=torch.Generator().manual_seed(0))
    assert weight.numel() > 2 * pattern_module._CHUNK
    weight[700:, :64] = 0  # ties in the later chunks alone
    mask = Pattern(2, 16).project(weight)
    assert kept_per_block(mask, 16).eq(2).all()
    assert mask[1020:].equal(naive_mask(weight[1020:], 2, 16))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("n", "m"), [(1, 16), (2, 4), (3, 16)])
def test_half_precision_ranks_as_fp32_does(dtype, n, m):
    """Few mantissa bits, many ties: the mask must be that of the same values in fp32."""
    weight = torch.randn(32, 64, generator=torch.Generator().manual_seed(0)).to(dtype)
    assert Pattern(n, m).project(weight).equal(naive_mask(weight.float(), n, m))


@pytest.mark.parametrize("m", [4, 16])
@pytest.mark.parametrize("n", [1, 2])
def test_scores_are_compared_in_fp32(n, m):
    """Doubles that are one number in fp32 tie, so that a run in double makes the masks of a run in single."""
    weight = (1 + 1e-12 * torch.arange(m, dtype=torch.float64))[None]
    assert Pattern(n, m).project(weight)[0].nonzero().flatten().tolist() == list(range(n))


def test_conv_blocks_run_along_input_channels():
    """The older kernel-flattened grouping is another pattern: in a 3x3 kernel its blocks are not N:M."""
    weight = torch.randn(32, 8, 3, 3, generator=torch.Generator().manual_seed(0))
    mask = Pattern(2, 4).project(weight)
    assert mask.permute(0, 2, 3, 1).reshape(-1, 4).sum(1).eq(2).all()
    assert not mask.reshape(-1, 4).sum(1).eq(2).all()


@pytest.mark.parametrize(("n", "m"), [(1, 4), (2, 4), (4, 4), (2, 16)])
@pytest.mark.parametrize("at", [(0, 0), (3, 7), (7, 15)])
def test_nan_is_an_error_wherever_it_is(n, m, at, monkeypatch):
    monkeypatch.setattr(pattern_module, "_CHUNK", 40)  # 16 inputs per row: two rows at a time
    weight = torch.full((8, 16), math.inf)
    weight[at] = math.nan
    with pytest.raises(FloatingPointError, match="NaN"):
        Pattern(n, m).project(weight)


@pytest.mark.parametrize("text", ["1:16", "2:16", "4:32"])
def test_every_layer_of_a_real_network_projects(text):
    """Patterns of this size are out of reach of implementations that enumerate the choices of a block."""
    pattern = Pattern.parse(text)
    model = models.create("resnet32_cifar", num_classes=10, image_shape=(3, 32, 32))
    fitting = [p.detach() for p in model.parameters() if pattern.fits(p.shape)]
    assert len(fitting) > 10
    for weight in fitting:
        assert int(pattern.project(weight).count_nonzero()) == weight.numel() * pattern.density


@pytest.mark.parametrize("n", [1, 3, 6])
@pytest.mark.parametrize("dim", [0, 1])
def test_keep_largest_signed_scores_along_any_dimension(n, dim):
    """Here the largest wins, not the largest magnitude: methods rank gains as well as weights."""
    score = torch.randint(-3, 3, (6, 6), generator=torch.Generator().manual_seed(0)).float()
    expected = torch.zeros(6, 6, dtype=torch.bool)
    for line, row in enumerate(score.movedim(dim, -1).tolist()):
        for i in sorted(range(6), key=lambda i: -row[i])[:n]:
            expected.movedim(dim, -1)[line, i] = True
    assert keep_largest(score, n, dim=dim).equal(expected)


# --- check ---


def test_check_names_the_first_violating_block():
    weight = torch.zeros(4, 8, 3, 3)
    weight[:, 0] = 1
    assert Pattern(1, 4).check(weight) is None
    weight[1, 4:7, 0, 2] = -1  # output 1, second block, kernel position (0, 2): three kept
    weight[3, 1, 1, 1] = 1
    violation = Pattern(1, 4).check(weight)
    assert violation == (2, (1, 1, 0, 2), 3)
    assert Pattern(2, 4).check(weight).blocks == 1
    assert Pattern(3, 4).check(weight) is None


def test_check_counts_per_output_row():
    """Two outputs with 2 of 4 and none: the flat average is 1 of 4, the network is not."""
    weight = torch.tensor([[1.0, 1, 0, 0], [0, 0, 0, 0]])
    assert Pattern(1, 4).check(weight) == (1, (0, 0), 2)


# --- some blocks as rows ---


def _inside_a_buffer(*shape: int) -> Tensor:
    return torch.randn(3, *shape)[1]


LAYOUTS = {
    "linear": lambda: torch.randn(6, 8),
    "linear, transposed in memory": lambda: torch.randn(8, 6).t(),
    "linear, inside a buffer": lambda: _inside_a_buffer(6, 8),
    "1x1": lambda: torch.randn(6, 8, 1, 1),
    "1x1 channels last": lambda: torch.randn(6, 8, 1, 1).to(memory_format=torch.channels_last),
    "3x3": lambda: torch.randn(6, 8, 3, 3),
    "3x3 channels last": lambda: torch.randn(6, 8, 3, 3).to(memory_format=torch.channels_last),
    "1x3": lambda: torch.randn(6, 8, 1, 3),
}


def block_rows(tensor: Tensor, pattern: Pattern) -> Tensor:
    """All blocks as rows, by plain indexing: output, block, kernel position."""
    return pattern.blocks(tensor).movedim(2, -1).reshape(-1, pattern.m)


@pytest.mark.parametrize("pattern", [Pattern(2, 4), Pattern(1, 8), Pattern(1, 1)], ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_picked_blocks_are_those_of_the_view(layout, pattern):
    weight = LAYOUTS[layout]()
    rows = block_rows(weight, pattern)
    ids = torch.randperm(len(rows))[: len(rows) // 2]
    picked = Picked(pattern, weight, ids)
    assert picked.read(weight).equal(rows[ids])

    expected, values = rows.clone(), torch.randn(len(ids), pattern.m)
    expected[ids] = values
    picked.write(weight, values)
    assert block_rows(weight, pattern).equal(expected)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_picked_reads_masks_and_gradients_too(layout):
    """Whatever is laid out like the weight: masks are what methods write most."""
    weight, pattern = LAYOUTS[layout](), Pattern(2, 4)
    mask = pattern.project(weight)
    ids = torch.tensor([5, 0])
    picked = Picked(pattern, weight, ids)
    assert picked.read(mask).sum(1).tolist() == [2, 2]
    picked.write(mask, torch.ones(2, 4, dtype=torch.bool))
    wrong = block_rows(mask, pattern).sum(1)
    assert wrong[ids].tolist() == [4, 4]
    assert int(wrong.sum()) == 2 * pattern.num_blocks(weight.shape) + 4


def test_picking_nothing_touches_nothing():
    weight = torch.randn(6, 8, 3, 3)
    before = weight.clone()
    picked = Picked(Pattern(2, 4), weight, torch.empty(0, dtype=torch.int64))
    assert picked.read(weight).shape == (0, 4)
    picked.write(weight, torch.empty(0, 4))
    assert weight.equal(before)


def test_picked_never_misreads_another_layout():
    """A slice of a larger tensor, as channel pruning leaves it, is dense once copied: other strides, other offsets."""
    weight, pattern = torch.randn(6, 16)[:, :8], Pattern(2, 4)
    ids = torch.tensor([2, 5])
    try:
        read = Picked(pattern, torch.empty_like(weight), ids).read(weight)
    except ValueError:
        return  # refusing is right as well
    assert read.equal(block_rows(weight, pattern)[ids])


# --- masking in place ---

FORMATS = {"contiguous": torch.contiguous_format, "channels last": torch.channels_last}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("of_out", FORMATS)
@pytest.mark.parametrize("of_mask", FORMATS)
@pytest.mark.parametrize("of_tensor", FORMATS)
def test_keep_where_is_a_product(of_tensor, of_mask, of_out, dtype, monkeypatch):
    """In chunks when all three lie alike in memory, and right as well when they do not."""
    monkeypatch.setattr(pattern_module, "_WIDENED", 7)
    tensor = torch.randn(4, 8, 3, 3).to(dtype).to(memory_format=FORMATS[of_tensor])
    mask = (torch.rand(4, 8, 3, 3) < 0.5).to(memory_format=FORMATS[of_mask])
    out = torch.full((4, 8, 3, 3), 9.0, dtype=dtype).to(memory_format=FORMATS[of_out])
    expected = torch.where(mask, tensor, 0)
    assert keep_where(tensor, mask, out=out) is out
    assert out.equal(expected)


@pytest.mark.parametrize("of_mask", FORMATS)
@pytest.mark.parametrize("chunk", [1, 7, 288, 1000])
def test_zero_where_is_in_place(chunk, of_mask, monkeypatch):
    monkeypatch.setattr(pattern_module, "_WIDENED", chunk)
    tensor, mask = torch.randn(4, 8, 3, 3), (torch.rand(4, 8, 3, 3) < 0.5).to(memory_format=FORMATS[of_mask])
    expected, address = torch.where(mask, tensor, 0), tensor.data_ptr()
    assert zero_where_(tensor, mask) is tensor
    assert tensor.data_ptr() == address
    assert tensor.equal(expected)


def test_keep_where_inside_a_larger_tensor():
    """Slices with equal strides have gaps in memory: what lies in the gaps is not ours."""
    tensor, mask, out = torch.randn(4, 16), torch.rand(4, 16) < 0.5, torch.full((4, 16), 9.0)
    keep_where(tensor[:, :8], mask[:, :8], out=out[:, :8])
    assert out[:, :8].equal(torch.where(mask, tensor, 0)[:, :8])
    assert out[:, 8:].eq(9).all()


# --- selection ---


@SEVERAL
@given(st.lists(st.sampled_from([-math.inf, -1.0, 0.0, 0.5, 2.0, math.inf]), min_size=1, max_size=40), st.data())
def test_lowest_is_a_stable_sort(values, data):
    count = data.draw(st.integers(0, len(values)))
    chosen = lowest(torch.tensor(values), count)
    assert chosen.dtype == torch.int64
    assert chosen.tolist() == sorted(sorted(range(len(values)), key=lambda i: values[i])[:count])


@pytest.mark.parametrize("shape", [(3, 5), (8, 8), (4, 6, 3, 3)])
def test_a_packed_mask_is_the_mask_again(shape):
    mask = torch.rand(shape, generator=torch.Generator().manual_seed(0)) < 0.3
    packed = pattern_module.pack(mask)
    assert packed.numel() == -(-mask.numel() // 8)
    assert torch.equal(pattern_module.unpack(packed, mask.shape), mask)
