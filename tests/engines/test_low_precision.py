"""Stochastic rounding, 8-bit moments, and the AdamW that uses both."""

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from config import InputError, load
from engines import adamw, moments
from engines.adamw import AdamW, Storage
from engines.optimizer import ShardedMuon, check_optimizer
from engines.rounding import noise_key, random_bits, to_bfloat16
from tests.support.ranks import on_ranks

BETAS = (0.9, 0.95)
EPS = 1e-8
STORAGES = {
    "bfloat16": (torch.bfloat16, Storage(None, True, 0, False)),
    "bfloat16, fp32 moments": (torch.bfloat16, Storage(torch.float32, True, 0, False)),
    "bfloat16, 8-bit moments": (torch.bfloat16, Storage(torch.uint8, True, 0, False)),
    "fp32, 8-bit moments": (torch.float32, Storage(torch.uint8, True, 0, False)),
}
NEAREST = Storage(None, False, 0, False)
MESHES = ["2 ranks", "4 ranks", "2 copies", "1 copy on 2 ranks"]


# -- rounding --------------------------------------------------------------------------------------


def draw(x: float, count: int) -> Tensor:
    """Return `count` roundings of a number."""
    numbers = torch.full((count,), x)
    key = torch.tensor(noise_key(0, 1, "test"))
    bits = random_bits(key, torch.tensor(0), numbers)
    return to_bfloat16(numbers, bits & 0xFFFF)


@pytest.mark.parametrize("share", [0.0, 0.01, 0.3, 0.5, 0.99])
@pytest.mark.parametrize("sign", [1, -1])
def test_a_number_becomes_the_next_one_as_often_as_it_is_near_to_it(share, sign):
    """In 100,000 draws, the standard deviation of the share is at most 0.0016."""
    # Between 1 and 2, bfloat16 has steps of 2 ** -7.
    rounded = draw(sign * (1 + share * 2**-7), 100_000)
    assert set(rounded.tolist()) <= {sign * 1.0, sign * (1 + 2**-7)}
    assert (rounded != sign).float().mean().item() == pytest.approx(share, abs=0.007)


def test_numbers_of_bfloat16_stay():
    every_number = torch.arange(-(2**15), 2**15, dtype=torch.int16).view(torch.bfloat16)
    finite = every_number[every_number.isfinite()]
    bits = torch.full(finite.shape, 0xFFFF)
    assert torch.equal(to_bfloat16(finite.float(), bits), finite)


def test_infinities_and_nan_stay():
    numbers = torch.tensor([float("inf"), -float("inf"), float("nan")])
    rounded = to_bfloat16(numbers, torch.full((3,), 0xFFFF))
    assert rounded[:2].tolist() == numbers[:2].tolist()
    assert rounded[2].isnan()


def test_bits_depend_on_the_position_in_the_whole_parameter():
    key = torch.tensor(noise_key(0, 1, 0))
    whole = random_bits(key, torch.tensor(0), torch.empty(10, 7))
    part = random_bits(key, torch.tensor(21), torch.empty(4, 7))
    assert torch.equal(part, whole[3:7])


@pytest.mark.slow
def test_bits_are_even_and_independent():
    """Of a million bits of each place, the standard deviation of the mean is 0.0005."""
    like = torch.empty(2**20)
    names = [(0, 1, 0), (0, 2, 0), (0, 1, 1), (1, 1, 0)]
    draws = []
    for name in names:
        numbers = random_bits(torch.tensor(noise_key(*name)), torch.tensor(0), like)
        assert numbers.dtype is torch.int32
        draws.append((numbers[:, None] >> torch.arange(32)) & 1)
    for number, bits in enumerate(draws):
        assert (bits.float().mean(0) - 0.5).abs().max() < 0.003
        neighbours = (bits[1:] == bits[:-1]).float().mean(0)
        assert (neighbours - 0.5).abs().max() < 0.003
        for other in draws[:number]:
            assert ((bits == other).float().mean(0) - 0.5).abs().max() < 0.003


# -- codes -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("signed", [True, False])
def test_the_numbers_of_codes_are_kept(signed):
    table = moments.make_codes(signed, torch.device("cpu"))
    values = table.values
    assert len(values) == 256
    assert (values.diff() > 0).all()
    rows = values[None].repeat(2, 1) * torch.tensor([[3.0], [1e-20]])
    for bits in (None, torch.full(rows.shape, 0x7FFF)):
        codes, scale = moments.encode(rows, table, bits)
        assert scale.flatten().tolist() == pytest.approx([3.0, 1e-20])
        torch.testing.assert_close(moments.decode(codes, scale, table), rows)


@pytest.mark.parametrize("signed", [True, False])
def test_codes_are_right_in_the_mean(signed):
    """Each number is stored 4,096 times; the bound is six standard deviations."""
    table = moments.make_codes(signed, torch.device("cpu"))
    generator = torch.Generator().manual_seed(0)
    numbers = torch.randn(300, generator=generator) * 1e-6
    numbers = numbers if signed else numbers.abs()

    def stored(rows: Tensor, bits: Tensor | None) -> Tensor:
        return moments.decode(*moments.encode(rows, table, bits), table)

    rows = numbers.repeat(4096, 1)
    bits = random_bits(torch.tensor(noise_key(0, 1)), torch.tensor(0), rows) & 0xFFFF
    mean = stored(rows, bits).mean(0)
    below = stored(rows[:1], torch.full((1, 300), 0xFFFF))[0]
    above = stored(rows[:1], torch.zeros(1, 300, dtype=torch.int64))[0]
    rounding = 1e-6 * numbers.abs()
    assert (below <= numbers + rounding).all() and (numbers <= above + rounding).all()
    share = ((numbers - below) / (above - below).clamp(min=1e-12)).clamp(0, 1)
    deviation = (above - below) * (share * (1 - share) / 4096).sqrt()
    assert ((mean - numbers).abs() <= 6 * deviation + (above - below) / 4096 + rounding).all()
    nearest = stored(rows[:1], None)[0]
    smaller_error = torch.minimum(numbers - below, above - numbers).clamp(min=0)
    assert ((nearest - numbers).abs() <= smaller_error + rounding).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(5,), (3, 7), (2, 256), (2, 300), (2, 3, 513)])
@pytest.mark.parametrize("state_dtype", adamw.STATE_DTYPES.values())
def test_the_estimate_of_a_moment_counts_its_codes_and_scales(dtype, shape, state_dtype):
    parameter = torch.nn.Parameter(torch.zeros(shape, dtype=dtype))
    storage = Storage(state_dtype, True, 0, False)
    state = AdamW([{"params": [parameter]}], 0.1, BETAS, EPS, storage).initial_state(parameter)
    num_bytes = sum(x.nbytes for name, x in state.items() if name.startswith("exp_avg_sq"))
    assert adamw.moment_bytes(parameter, state_dtype) == num_bytes


@pytest.mark.parametrize("bits", [None, torch.full((1, 3), 0xFFFF)], ids=["nearest", "down"])
def test_positive_second_moments_never_become_zero(bits):
    rows = torch.tensor([[1.0, 1e-12, 0.0]])
    table = moments.make_codes(False, torch.device("cpu"))
    stored = moments.decode(*moments.encode(rows, table, bits), table)
    assert stored[0, 1] > 0
    assert stored[0, 2] == 0


def test_blocks_end_with_the_row():
    rows = torch.randn(8, 300, generator=torch.Generator().manual_seed(0))
    table = moments.make_codes(True, torch.device("cpu"))
    codes, scale = moments.encode(rows, table, None)
    assert codes.shape == (8, 300) and scale.shape == (8, 2)
    for row in range(8):
        codes_alone, scale_alone = moments.encode(rows[row : row + 1], table, None)
        assert torch.equal(codes_alone[0], codes[row])
        assert torch.equal(scale_alone[0], scale[row])


def test_a_block_of_small_numbers_keeps_its_precision_beside_one_of_large_numbers():
    rows = torch.rand(4, 2 * moments.BLOCK, generator=torch.Generator().manual_seed(0)) + 0.5
    rows[:, moments.BLOCK :] *= 1e-9
    table = moments.make_codes(True, torch.device("cpu"))
    stored = moments.decode(*moments.encode(rows, table, None), table)
    assert (stored / rows - 1).abs().max() < 0.03


# -- AdamW -----------------------------------------------------------------------------------------


def start_and_gradients(num_steps: int, size: float = 1e-3) -> tuple[Tensor, list[Tensor]]:
    """Return weights [64, 300], and gradients of them with a common direction."""
    generator = torch.Generator().manual_seed(1)
    start = torch.randn(64, 300, generator=generator) * 0.02
    direction = torch.randn(64, 300, generator=generator)
    noise = torch.randn(num_steps, 64, 300, generator=generator)
    return start.bfloat16().float(), list((direction * 0.3 + noise) * size)


def displacement(optimizer_of, dtype: torch.dtype, num_steps: int, size: float = 1e-3) -> Tensor:
    """Return how far the weights have moved after some steps: [64, 300] fp32."""
    start, gradients = start_and_gradients(num_steps, size)
    parameter = torch.nn.Parameter(start.to(dtype, copy=True))
    optimizer = optimizer_of([{"params": [parameter], "weight_decay": 0.01}])
    for gradient in gradients:
        parameter.grad = gradient.to(dtype)
        optimizer.step()
    return parameter.detach().float() - start


def ours(storage: Storage, lr: float, betas=BETAS):
    return lambda params: AdamW(params, lr, betas, EPS, storage)


def torchs(lr: float, betas=BETAS):
    return lambda params: torch.optim.AdamW(params, lr=lr, betas=betas, eps=EPS)


def along(moved: Tensor, reference: Tensor) -> float:
    """Return the share of the reference's displacement that another one has in its direction."""
    return ((moved * reference).sum() / reference.square().sum()).item()


def test_in_fp32_it_is_torchs_adamw():
    expected = displacement(torchs(1e-3), torch.float32, 20)
    moved = displacement(ours(Storage(torch.float32, True, 0, False), 1e-3), torch.float32, 20)
    assert (moved - expected).abs().max() < 1e-5 * expected.abs().max()


@pytest.mark.parametrize("name", STORAGES)
@pytest.mark.parametrize("lr", [1e-6, 1e-5, 1e-4])
def test_small_updates_count(name, lr):
    """After 50 steps, the weights have moved as far in fp32's direction; the bound is 3 deviations.

    Rounding moves each weight at random, besides, by about sqrt(steps * lr * distance between two
    bfloat16 numbers), which is more than lr * steps if lr is small.
    """
    dtype, storage = STORAGES[name]
    expected = displacement(torchs(lr), torch.float32, 50)
    moved = displacement(ours(storage, lr), dtype, 50)
    deviation = (moved - expected).norm() / expected.norm() / expected.numel() ** 0.5
    assert along(moved, expected) == pytest.approx(1, abs=max(0.02, 3 * deviation.item()))
    nearest = displacement(ours(NEAREST, lr), torch.bfloat16, 50)
    assert along(nearest, expected) < 0.8
    if lr == 1e-6:
        assert along(nearest, expected) < 0.02


@pytest.mark.slow
@pytest.mark.parametrize("size", [1e-10, 1e-6, 1.0])
@pytest.mark.parametrize("betas", [BETAS, (0.9, 0.999)])
def test_eight_bit_moments_are_near_to_fp32(size, betas):
    """For gradients of any size that epsilon lets count, and for slow second moments."""
    _, storage = STORAGES["fp32, 8-bit moments"]
    expected = displacement(torchs(1e-4, betas), torch.float32, 200, size)
    moved = displacement(ours(storage, 1e-4, betas), torch.float32, 200, size)
    assert (moved - expected).norm() < 0.03 * expected.norm()


def test_moments_of_eight_bits_are_the_means_of_the_gradients():
    """Up to the distance between two codes, which is 3 % for numbers of similar size."""
    generator = torch.Generator().manual_seed(0)
    signs = torch.randint(2, (4, 300), generator=generator) * 2 - 1
    gradients = (torch.rand(2, 4, 300, generator=generator) + 1) * signs
    parameter = torch.nn.Parameter(torch.zeros(4, 300))
    optimizer = ours(STORAGES["fp32, 8-bit moments"][1], 1e-3)([{"params": [parameter]}])
    first = second = torch.zeros(4, 300)
    for gradient in gradients:
        parameter.grad = gradient
        optimizer.step()
        first = 0.9 * first + 0.1 * gradient
        second = 0.95 * second + 0.05 * gradient.square()
    state = optimizer.state[parameter]
    codes = moments.codes_of_moments(parameter.device)
    stored = moments.decode(state["exp_avg"], state["exp_avg_scale"], codes.first)
    torch.testing.assert_close(stored, first, rtol=0.04, atol=0)
    root = moments.decode(state["exp_avg_sq"], state["exp_avg_sq_scale"], codes.second)
    torch.testing.assert_close(root.square(), second, rtol=0.06, atol=0)


@pytest.mark.parametrize(
    "dtype, state_dtype, stochastic, expected",
    [
        (torch.float32, None, True, True),
        (torch.float32, torch.float32, True, True),
        (torch.bfloat16, None, True, False),
        (torch.bfloat16, None, False, True),
        (torch.bfloat16, torch.float32, False, False),
        (torch.float32, torch.uint8, False, False),
    ],
)
def test_torchs_adamw_is_used_where_it_stores_the_same(dtype, state_dtype, stochastic, expected):
    groups = [{"params": [torch.nn.Parameter(torch.zeros(2, dtype=dtype))]}]
    assert Storage(state_dtype, stochastic, 0, False).suits_torch(groups) == expected


def test_a_loaded_state_keeps_its_dtypes():
    """torch would cast it to the dtype of the weights."""
    storage = STORAGES["bfloat16, 8-bit moments"][1]
    saved, loaded = (
        ours(storage, 1e-3)([{"params": [torch.nn.Parameter(torch.ones(2, 3).bfloat16())]}])
        for _ in range(2)
    )
    for optimizer in (saved, loaded):
        (parameter,) = optimizer.param_groups[0]["params"]
        parameter.grad = torch.full_like(parameter, 0.5)
    saved.step()
    loaded.load_state_dict(saved.state_dict())
    (expected,) = saved.state.values()
    (state,) = loaded.state.values()
    assert state.keys() == expected.keys()
    for name, tensor in expected.items():
        assert state[name].dtype == tensor.dtype, name
        assert torch.equal(state[name], tensor), name


def test_results_are_the_same_in_chunks(monkeypatch):
    dtype, storage = STORAGES["bfloat16, 8-bit moments"]
    whole = displacement(ours(storage, 1e-4), dtype, 3)
    monkeypatch.setattr(adamw, "CPU_CHUNK_ELEMENTS", 1000)
    assert torch.equal(displacement(ours(storage, 1e-4), dtype, 3), whole)
    other_seed = Storage(torch.uint8, True, 1, False)
    assert not torch.equal(displacement(ours(other_seed, 1e-4), dtype, 3), whole)


@pytest.mark.parametrize("kind", ["adamw", "muon"])
def test_every_parameter_has_random_bits_of_its_own(kind):
    """Whether others have a gradient or not: the expert of another one may get no token."""
    start, (gradient,) = start_and_gradients(1)

    def weights_after_a_step(has_gradient: list[bool]) -> list[Tensor]:
        parameters = [torch.nn.Parameter(start.bfloat16()) for _ in has_gradient]
        optimizer = make_optimizer(kind, parameters, STORAGES["bfloat16"][1])
        for parameter, has in zip(parameters, has_gradient):
            parameter.grad = gradient.bfloat16() if has else None
        optimizer.step()
        return [parameter.detach() for parameter in parameters]

    _, second, third = weights_after_a_step([True, True, True])
    assert not torch.equal(second, third)
    _, alone, _ = weights_after_a_step([False, True, False])
    assert torch.equal(alone, second)


def test_a_weight_and_its_moments_are_rounded_independently():
    """In 76,800 weights, the standard deviation of a correlation is 0.004."""
    parameter = torch.nn.Parameter(torch.ones(256, 300, dtype=torch.bfloat16))
    parameter.grad = torch.full_like(parameter, -0.3)
    optimizer = AdamW([{"params": [parameter]}], 2**-8, BETAS, EPS, STORAGES["bfloat16"][1])
    optimizer.step()
    state = optimizer.state[parameter]
    rounded = [parameter.detach(), state["exp_avg"], state["exp_avg_sq"]]
    is_up = []
    for numbers in rounded:
        assert len(numbers.unique()) == 2, "rounded up and down"
        is_up.append((numbers == numbers.max()).float().flatten())
    correlations = torch.corrcoef(torch.stack(is_up))
    assert (correlations - torch.eye(3)).abs().max() < 0.03


def first_positions_on_rank() -> list[int]:
    mesh = init_device_mesh("cpu", (2,))
    sizes = [(7, 96), (5, 6, 7), (11,)]
    sharded = [distribute_tensor(torch.zeros(size), mesh, [Shard(0)]) for size in sizes]
    return [adamw.first_position(parameter) for parameter in sharded]


def test_a_part_begins_behind_the_elements_of_earlier_ranks(tmp_path):
    positions = on_ranks(2, tmp_path, first_positions_on_rank)
    assert positions == [[0, 0, 0], [4 * 96, 3 * 6 * 7, 6]]


def make_optimizer(kind: str, parameters: list, storage: Storage):
    groups = [{"params": parameters, "weight_decay": 0.1}]
    if kind == "muon":
        settings = dict(lr=1e-4, momentum=0.95, adjust_lr_fn="match_rms_adamw")
        return ShardedMuon(groups, storage, **settings)
    return AdamW(groups, 1e-4, BETAS, EPS, storage)


def sharded_weights(name: str, kind: str, shape: tuple[int, ...]) -> list[Tensor]:
    """Return the whole weights after three steps, on a mesh of ranks."""
    dtype, storage = STORAGES[name]
    mesh = init_device_mesh("cpu", shape)
    placements = [*[Replicate()] * (mesh.ndim - 1), Shard(0)]
    generator = torch.Generator().manual_seed(0)
    sizes = [(32, 300), (7, 96), (1, 8)]  # ranks do not divide all rows
    if kind == "adamw":
        sizes += [(5, 6, 7), (11,)]
    parameters = []
    for size in sizes:
        start = torch.randn(size, generator=generator).to(dtype)
        parameters.append(torch.nn.Parameter(distribute_tensor(start, mesh, placements)))
    optimizer = make_optimizer(kind, parameters, storage)
    for _ in range(3):
        for parameter in parameters:
            gradient = torch.randn(parameter.shape, generator=generator).to(dtype)
            parameter.grad = distribute_tensor(gradient, mesh, placements)
        optimizer.step()
    copies = [p.full_tensor().detach() for p in parameters]
    for copy in copies:
        of_ranks = [torch.empty_like(copy) for _ in range(dist.get_world_size())]
        dist.all_gather(of_ranks, copy)
        assert all(torch.equal(other, copy) for other in of_ranks)
    return [copy.float() for copy in copies]


@pytest.mark.slow
@pytest.mark.parametrize("shape", [(2,), (4,), (2, 2)])
@pytest.mark.parametrize("name", ["bfloat16", "fp32, 8-bit moments", "bfloat16, 8-bit moments"])
def test_the_number_of_ranks_changes_nothing(tmp_path, name, shape):
    for folder in ("one", "more"):
        (tmp_path / folder).mkdir()
    (alone,) = on_ranks(1, tmp_path / "one", sharded_weights, name, "adamw", (1,))
    num_ranks = torch.Size(shape).numel()
    for weights in on_ranks(num_ranks, tmp_path / "more", sharded_weights, name, "adamw", shape):
        for weight, expected in zip(weights, alone):
            assert torch.equal(weight, expected)


@pytest.mark.parametrize("shape", [(2,), (2, 2), (2, 1), (1, 2)], ids=MESHES)
def test_muon_is_rounded_the_same_on_any_number_of_ranks(tmp_path, shape):
    """Sharded rows are orthogonalized as a whole, so only the random bits could differ."""
    for folder in ("one", "more"):
        (tmp_path / folder).mkdir()
    (alone,) = on_ranks(1, tmp_path / "one", sharded_weights, "bfloat16", "muon", (1,))
    num_ranks = torch.Size(shape).numel()
    for weights in on_ranks(
        num_ranks, tmp_path / "more", sharded_weights, "bfloat16", "muon", shape
    ):
        for weight, expected in zip(weights, alone):
            assert torch.equal(weight, expected)


@pytest.mark.usefixtures("process_group")
@pytest.mark.parametrize("is_sharded", [False, True])
@pytest.mark.parametrize("nesterov", [False, True])
def test_muon_keeps_its_momentum_from_step_to_step(nesterov, is_sharded):
    """On one rank, where a gathered matrix may be the rank's own memory."""
    start, gradients = start_and_gradients(5)
    settings = dict(lr=1e-2, weight_decay=0.1, nesterov=nesterov, adjust_lr_fn="match_rms_adamw")

    def parameter_of(values: Tensor) -> torch.nn.Parameter:
        if is_sharded:
            values = distribute_tensor(values, init_device_mesh("cpu", (1,)), [Shard(0)])
        return torch.nn.Parameter(values)

    expected = torch.nn.Parameter(start.clone())
    actual = parameter_of(start.clone())
    reference = torch.optim.Muon([expected], **settings)
    own = ShardedMuon([{"params": [actual]}], NEAREST, **settings)
    for gradient in gradients:
        expected.grad = gradient.clone()
        actual.grad = parameter_of(gradient.clone()).detach()
        reference.step()
        own.step()
    values = actual.full_tensor() if is_sharded else actual
    torch.testing.assert_close(values.detach(), expected.detach(), rtol=0, atol=1e-6)
    buffer = own.state[actual]["momentum_buffer"]
    buffer = buffer.full_tensor() if is_sharded else buffer
    torch.testing.assert_close(buffer, reference.state[expected]["momentum_buffer"])


@pytest.mark.usefixtures("process_group")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_muon_orthogonalizes_in_fp32_however_momentum_is_stored(dtype):
    """Whole weights and those that a single rank has as its shard get the same bits."""
    start, gradients = start_and_gradients(5)
    mesh = init_device_mesh("cpu", (1,))
    _, storage = STORAGES["bfloat16"]
    whole = torch.nn.Parameter(start.to(dtype, copy=True))
    sharded = distribute_tensor(start.to(dtype, copy=True), mesh, [Shard(0)])
    sharded = torch.nn.Parameter(sharded)
    settings = dict(lr=1e-2, adjust_lr_fn="match_rms_adamw")
    optimizers = [
        ShardedMuon([{"params": [parameter]}], storage, **settings)
        for parameter in (whole, sharded)
    ]
    for gradient in gradients:
        whole.grad = gradient.to(dtype)
        sharded.grad = distribute_tensor(gradient.to(dtype), mesh, [Shard(0)])
        for optimizer in optimizers:
            optimizer.step()
    assert torch.equal(whole, sharded.full_tensor())
    assert (whole.float() - start).abs().max() > 1e-3


def test_muon_keeps_small_updates():
    def moved(dtype: torch.dtype, storage: Storage) -> Tensor:
        start, gradients = start_and_gradients(30)
        parameter = torch.nn.Parameter(start.to(dtype, copy=True))
        optimizer = make_optimizer("muon", [parameter], storage)
        optimizer.param_groups[0]["lr"] = 1e-5
        for gradient in gradients:
            parameter.grad = gradient.to(dtype)
            optimizer.step()
        return parameter.detach().float() - start

    expected = moved(torch.float32, NEAREST)
    stochastic = moved(*STORAGES["bfloat16"])
    assert along(stochastic, expected) == pytest.approx(1, abs=0.05)
    assert along(moved(torch.bfloat16, NEAREST), expected) < 0.5


def test_muon_rounds_with_other_bits_in_each_step():
    start, (gradient, *_) = start_and_gradients(1)
    parameter = torch.nn.Parameter(start.bfloat16())
    optimizer = make_optimizer("muon", [parameter], STORAGES["bfloat16"][1])
    optimizer.param_groups[0].update(lr=1e-5, momentum=0.0)
    parameter.grad = gradient.bfloat16()
    results = []
    for _ in range(3):
        parameter.data.copy_(start)  # so that all steps compute the same numbers before rounding
        optimizer.step()
        results.append(parameter.detach().clone())
    first, second, third = results
    assert not torch.equal(first, second)
    assert not torch.equal(first, third)
    assert not torch.equal(second, third)


@pytest.mark.slow
def test_compiled_bits_are_the_same():
    key = torch.tensor(noise_key(0, 1, 0))
    like = torch.empty(1000, 7)
    compiled = torch.compile(random_bits, dynamic=True)
    for first in (0, 10**6):
        position = torch.tensor(first)
        assert torch.equal(compiled(key, position, like), random_bits(key, position, like))


@pytest.mark.slow
@pytest.mark.parametrize("name", STORAGES)
def test_the_compiled_update_is_the_same(name):
    """Compiled code may fuse a product and a sum, which rounds once instead of twice."""
    dtype, storage = STORAGES[name]
    compiled = Storage(storage.state_dtype, True, 0, True)
    plain = displacement(ours(storage, 1e-4), dtype, 3)
    moved = displacement(ours(compiled, 1e-4), dtype, 3)
    assert (moved != plain).float().mean() < 0.05 or (moved - plain).abs().max() < 1e-6
    assert (moved - plain).norm() < 0.01 * plain.norm()


# -- settings --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "settings, message",
    [
        (["optim.rounding=nearest"], "optim.rounding=nearest has no effect"),
        (["optim.name=muon", "optim.state_dtype=int8"], "needs optim.name=adamw"),
        (["model_engine=megatron", "optim.state_dtype=int8"], "needs model_engine=fsdp"),
        (["optim.name={file}:sgd", "optim.state_dtype=int8"], "has no effect with optim.name"),
        (["model_engine=megatron", "optim.rounding=nearest"], "needs model_engine=fsdp"),
        (
            ["optim.name={file}:sgd", "optim.rounding=nearest", "engine.param_dtype=bfloat16"],
            "optim.rounding=nearest has no effect with optim.name",
        ),
        (["optim.state_dtype=float32", "optim.rounding=nearest"], "weights and moments are float"),
        # The only weights that are trained are the adapters'.
        (
            ["model.lora.rank=4", "engine.param_dtype=bfloat16", "optim.rounding=nearest"],
            "weights and moments are float",
        ),
    ],
)
def test_settings_without_effect_are_errors(tmp_path, settings, message):
    file = tmp_path / "mine.py"
    file.write_text("def sgd(params, lr, **_): ...\n")
    settings = [setting.format(file=file) for setting in settings]
    config = load("sft.yaml", ["model.path=unused", "data.train_files=unused", *settings])
    with pytest.raises(InputError, match=message):
        check_optimizer(config)


@pytest.mark.parametrize(
    "settings",
    [
        ["engine.param_dtype=bfloat16", "optim.rounding=nearest"],
        ["model.lora.rank=4", "model.lora.dtype=bfloat16", "optim.rounding=nearest"],
        ["optim.state_dtype=int8", "optim.rounding=nearest"],
        ["optim.state_dtype=bfloat16"],
        ["engine.param_dtype=bfloat16", "optim.state_dtype=float32", "optim.rounding=nearest"],
        ["optim.name=muon", "optim.state_dtype=bfloat16"],
    ],
)
def test_settings_with_an_effect_are_accepted(settings):
    check_optimizer(load("sft.yaml", ["model.path=unused", "data.train_files=unused", *settings]))
