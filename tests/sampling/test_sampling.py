from __future__ import annotations

import dataclasses
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.extend.random import threefry_2x32

import tbo_jax.sampling.params
from tbo_jax.sampling.draw import NOT_FINITE, SamplingInputs, greedy, kept_tokens, sample
from tbo_jax.sampling.params import MAX_SEED, SamplingParams

jit_sample = jax.jit(sample)
jit_kept = jax.jit(kept_tokens)


def inputs_of(rows: list[SamplingParams], step: int = 0) -> SamplingInputs:
    seeds = [0 if params.seed is None else params.seed for params in rows]
    return SamplingInputs.from_rows(rows, seeds, [step] * len(rows), len(rows))


def reference_kept(
    row: np.ndarray, temperature: float, top_k: int, top_p: float, min_p: float
) -> np.ndarray:
    """The kept set by sorting, in float64; tokens that tie with the last one kept stay."""
    scaled = row.astype(np.float64) / temperature
    weight = np.exp(scaled - scaled.max())
    keep = np.ones(len(row), bool)
    if top_k and top_k < len(row):
        keep &= scaled >= np.sort(scaled)[-top_k]
    if top_p < 1:
        order = np.sort(scaled[keep])[::-1]
        mass = np.cumsum(np.exp(order - order[0])) / weight[keep].sum()
        keep &= scaled >= order[np.searchsorted(mass, top_p)]
    likely: np.ndarray = keep & (weight >= min_p)
    return likely


# Parameters


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *[("max_new_tokens", v) for v in (0, -1, 1.0, True, "3", None, float("nan"))],
        *[("temperature", v) for v in (-0.1, float("nan"), float("inf"), True, "1", None, 10**400)],
        *[("top_k", v) for v in (-2, 2.0, False, "5", None)],
        *[("top_p", v) for v in (0, 0.0, 1.01, -0.5, float("nan"), True, "0.9", None)],
        *[("min_p", v) for v in (-0.01, 1.5, float("nan"), True, "0", None)],
        *[("seed", v) for v in (-1, 2**63, 1.0, True, "7")],
        *[("stop", v) for v in ("", ("a", ""), ["a", 1], 5, None, {"a"}, b"a")],
        *[("ignore_eos", v) for v in (0, 1, "yes", None)],
        *[("skip_special_tokens", v) for v in (0, "yes", None)],
        *[("include_stop_str_in_output", v) for v in (1, "no", None)],
        *[("n", v) for v in (0, 1.0, True, None)],
        *[("logprobs", v) for v in (-1, 1.0, True, "3")],
        ("prompt_logprobs", -1),
        *[("repetition_penalty", v) for v in (0, 0.0, -1.0, float("inf"), float("nan"), "1", None)],
        *[("repetition_penalty", v) for v in (1e-40, 9e-31, 1.1e30, 1e300)],
        *[("frequency_penalty", v) for v in (-2.1, 2.5, float("nan"), True, None)],
        *[("presence_penalty", v) for v in (-2.1, 2.5, float("nan"), True, None)],
        *[("logit_bias", v) for v in ({1: float("nan")}, {1: float("inf")}, {1: "2"}, 5, None)],
        *[("logit_bias", v) for v in ({1: 1e39}, {1: True}, "ab", [(1,)])],
        *[("bad_words", v) for v in ("", ("a", ""), ["a", 1], 5, None)],
        *[("min_tokens", v) for v in (-1, 129, 1.0, True, None)],
        *[("allowed_token_ids", v) for v in ([], 5, "12", {1: 2}, b"ab")],
        *[("stop_token_ids", v) for v in (5, None, "12", {1: 2})],
        *[("json_object", v) for v in (0, "yes", None)],
        *[("json_schema", v) for v in ("", 5, [], True, {1: 2}, {"enum": (1,)}, {"const": set()})],
        *[("json_schema", v) for v in ({"minimum": float("nan")}, '{"const": "\ud800"}')],
        *[("regex", v) for v in ("", 5, False, b"a", "\ud800")],
        *[("grammar", v) for v in ("", 5, ["a"], "\ud800")],
        *[("choice", v) for v in ("", [], ["a", ""], ["a", 1], {"a"}, "\ud800")],
    ],
)
def test_bad_parameter_is_named(field: str, value: Any) -> None:
    with pytest.raises(ValueError, match=rf"SamplingParams\.{field} is .*; expected ") as error:
        SamplingParams(**{field: value})
    assert repr(value) in str(error.value)


def test_parameters_are_normalised() -> None:
    loose: dict[str, Any] = {"stop": "end", "top_k": np.int64(3), "min_p": np.float32(0.5)}
    params = SamplingParams(temperature=1, seed=MAX_SEED, **loose)
    assert params.stop == ("end",)
    assert SamplingParams(stop=["a", "b"]).stop == ("a", "b")  # type: ignore[arg-type]
    assert type(params.temperature) is float and type(params.top_k) is int
    assert hash(params) == hash(SamplingParams(**{f: getattr(params, f) for f in params.__slots__}))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(regex="a", choice=["b"]), "regex is 'a'; expected one of regex, choice, which excl"),
        (dict(json_object=True, json_schema={}), "json_schema is {}; expected one of json_schema"),
        (dict(json_object=True, ignore_eos=True), "ignore_eos is True; expected False with json_o"),
        (dict(json_schema="[1]"), "json_schema: expected a JSON object, got list"),
        (dict(json_schema="{1}"), "json_schema: not valid JSON: Expecting property name"),
        (dict(json_schema='{"a": 1, "a": 2}'), "json_schema: not valid JSON: key 'a' occurs 2"),
    ],
)
def test_structures_that_cannot_be_are_named(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=rf"^SamplingParams\.{re.escape(message)}"):
        SamplingParams(**options)


def test_structures_have_one_form() -> None:
    schema = {"type": "object", "properties": {"b": {"const": "é"}, "a": {"minimum": 1.5}}}
    params = SamplingParams(json_schema=schema)
    assert isinstance(params.json_schema, str) and json.loads(params.json_schema) == schema
    assert list(json.loads(params.json_schema)["properties"]) == ["b", "a"]
    assert params.structure == ("json_schema", params.json_schema)
    assert SamplingParams(json_schema=' {"type":  "null"}').json_schema == ' {"type":  "null"}'
    assert SamplingParams(choice="yes").structure == ("choice", ("yes",))  # type: ignore[arg-type]
    assert SamplingParams(json_object=True).structure == ("json_object", True)
    assert SamplingParams(regex="a").structure == ("regex", "a")
    assert SamplingParams().structure is None
    assert dataclasses.replace(params) == params and hash(dataclasses.replace(params))


@pytest.mark.parametrize("field", ["logit_bias", "allowed_token_ids", "stop_token_ids"])
@pytest.mark.parametrize("token", [-1, 2**31, 1.0, True, "7"])
def test_what_is_no_token_id_is_named(field: str, token: Any) -> None:
    value = {token: 1.0} if field == "logit_bias" else [3, token]
    named = rf"SamplingParams\.{field} is {re.escape(repr(token))}; expected an integer, from 0 to"
    with pytest.raises(ValueError, match=named):
        SamplingParams(**{field: value})


def test_names_of_other_engines_are_understood() -> None:
    assert SamplingParams(max_tokens=5) == SamplingParams(max_new_tokens=5)
    assert SamplingParams(max_tokens=5, max_new_tokens=5).max_new_tokens == 5
    assert SamplingParams(top_k=-1) == SamplingParams(top_k=0)
    with pytest.raises(ValueError, match=r"max_tokens is 5; expected it or max_new_tokens"):
        SamplingParams(max_tokens=5, max_new_tokens=6)
    with pytest.raises(ValueError, match=r"max_tokens is 0; expected an integer, 1 or more"):
        SamplingParams(max_tokens=0)
    again = dataclasses.replace(SamplingParams(max_tokens=5), seed=3)
    assert again == SamplingParams(max_new_tokens=5, seed=3)


def test_ids_and_biases_have_one_form() -> None:
    loose: dict[str, Any] = {"stop_token_ids": iter([5, np.int32(2), 5])}
    params = SamplingParams(logit_bias={7: 1, np.int64(3): -2}, allowed_token_ids={4, 1}, **loose)
    assert params.stop_token_ids == (2, 5) and params.allowed_token_ids == (1, 4)
    assert params.logit_bias == ((3, -2.0), (7, 1.0))
    assert dataclasses.replace(params) == params and hash(dataclasses.replace(params))
    assert SamplingParams(bad_words="no").bad_words == ("no",)  # type: ignore[arg-type]


def test_parameters_do_not_import_jax() -> None:
    # Under an empty stand-in for the package, whose own __init__ may import more.
    folder = str(Path(tbo_jax.sampling.params.__file__).parent.parent)
    code = f"""
import sys, types
package = sys.modules["tbo_jax"] = types.ModuleType("tbo_jax")
package.__path__ = [{folder!r}]
import tbo_jax.sampling.params
sys.exit("jax" in sys.modules)
"""
    subprocess.run([sys.executable, "-c", code], check=True)


def test_rows_are_padded_with_greedy_ones() -> None:
    params = SamplingParams(temperature=0.5, top_k=2**40, top_p=0.9, min_p=0.1)
    inputs = SamplingInputs.from_rows([params], [2**33 + 5], [7], 3)
    assert inputs.seed.tolist() == [[2, 5], [0, 0], [0, 0]]
    assert inputs.temperature.tolist() == [0.5, 0, 0]
    assert inputs.top_k.tolist() == [2**31 - 1, 0, 0]
    assert inputs.step.tolist() == [7, 0, 0]
    assert [a.dtype.name for a in jax.tree.leaves(inputs)] == [
        "float32", "int32", "float32", "float32", "uint32", "int32"
    ]  # fmt: skip
    with pytest.raises(ValueError, match="1 params, 1 seeds and 1 steps for 0 rows"):
        SamplingInputs.from_rows([params], [1], [0], 0)


def test_packed_inputs_come_back_bit_for_bit() -> None:
    rows = [
        SamplingParams(temperature=1e-39, top_k=3, top_p=0.3, min_p=0.7),
        SamplingParams(temperature=1e38, seed=MAX_SEED),
    ]
    inputs = inputs_of(rows, step=2**31 - 1)
    packed = inputs.packed()
    assert packed.dtype == np.int32 and packed.shape == (2, 7)
    found = jax.jit(SamplingInputs.unpack)(packed)
    for name, value in vars(inputs).items():
        unpacked = np.asarray(getattr(found, name))
        assert unpacked.dtype == value.dtype and unpacked.tobytes() == value.tobytes(), name


# Which tokens are left to draw from

VOCABULARY = 40
# Subnormal numbers may be flushed to zero, which ties them.
logit = st.floats(-30, 30, width=32, allow_subnormal=False)
logit |= st.sampled_from([0.0, -0.0, 1.0, 2.0, -1e30, 1e-30, -np.inf])
rows_of_logits = st.lists(logit, min_size=1, max_size=VOCABULARY).filter(
    lambda row: max(row) > -np.inf
)
filters = st.tuples(
    st.sampled_from([0.25, 0.5, 1.0, 2.0]),
    st.integers(0, VOCABULARY + 5),
    st.just(1.0) | st.floats(2**-10, 1, width=32),
    st.just(0.0) | st.floats(0, 1, width=32, allow_subnormal=False),
)


def check_kept(
    row: np.ndarray, setting: tuple[float, int, float, float], kept: np.ndarray, slack: float
) -> int:
    """Assert that kept is the reference's set; the number of tokens too near a limit to say."""
    t, k, p, m = setting
    few = reference_kept(row, t, k, p * (1 - slack), m * (1 + slack))
    many = reference_kept(row, t, k, p if p == 1 else p * (1 + slack), m * (1 - slack))
    assert np.all(few <= kept) and np.all(kept <= many), (row, setting)
    return int(many.sum() - few.sum())


@settings(max_examples=200, deadline=None)
@given(st.lists(st.tuples(rows_of_logits, filters), min_size=2, max_size=2))
def test_kept_set_equals_the_sorted_reference(
    cases: list[tuple[list[float], tuple[float, int, float, float]]],
) -> None:
    logits = np.full((len(cases), VOCABULARY), -np.inf, np.float32)
    for row, (values, _) in zip(logits, cases, strict=True):
        row[: len(values)] = values
    kept = jit_kept(logits, inputs_of([SamplingParams(1, *setting) for _, setting in cases]))
    for row, (_, setting), got in zip(logits, cases, np.asarray(kept), strict=True):
        check_kept(row, setting, got, 1e-6)


def test_kept_set_of_a_large_vocabulary() -> None:
    logits = np.random.default_rng(3).normal(size=(6, 50_001)).astype(np.float32)
    logits *= np.array([[8.0], [8.0], [1.0], [1.0], [0.01], [0.01]], np.float32)
    cases = [
        *((1.0, 50, 1.0, 0.0), (2.0, 0, 0.999, 0.0), (0.5, 700, 0.5, 0.0)),
        *((1.0, 0, 0.9, 1e-3), (1.0, 0, 0.3, 0.0), (1.0, 49_000, 0.99, 0.0)),
    ]
    kept = jit_kept(logits, inputs_of([SamplingParams(1, *case) for case in cases]))
    for row, case, got in zip(logits, cases, np.asarray(kept), strict=True):
        assert check_kept(row, case, got, 1e-6) < 30


def test_ties_with_the_last_kept_token_are_kept() -> None:
    logits = jnp.array([[3.0, 2.0, 2.0, 2.0, 1.0]] * 2)
    kept = jit_kept(logits, inputs_of([SamplingParams(1, 1.0, 2), SamplingParams(1, 1.0, 0, 0.6)]))
    assert kept.tolist() == [[True, True, True, True, False]] * 2


@pytest.mark.parametrize(("top_k", "kept"), [(1, 1), (4, 4), (5, 5), (6, 5), (0, 5)])
def test_top_k_keeps_that_many(top_k: int, kept: int) -> None:
    found = jit_kept(jnp.arange(5.0)[None], inputs_of([SamplingParams(1, 1.0, top_k)]))
    assert found.tolist() == [[False] * (5 - kept) + [True] * kept]


def test_top_p_acts_on_what_top_k_left() -> None:
    logits = jnp.log(jnp.array([[0.4, 0.3, 0.2, 0.1]]))
    # The best token has 0.4 of all the mass, and 0.57 of the best two's.
    alone = jit_kept(logits, inputs_of([SamplingParams(1, 1.0, 0, 0.55)]))
    after = jit_kept(logits, inputs_of([SamplingParams(1, 1.0, 2, 0.55)]))
    assert alone.tolist() == [[True, True, False, False]]
    assert after.tolist() == [[True, False, False, False]]


@pytest.mark.parametrize(("top_p", "kept"), [(0.25, 2), (0.5, 4), (0.75, 6)])
def test_top_p_that_is_reached_exactly_needs_no_more(top_p: float, kept: int) -> None:
    # So high a temperature makes all weights 1, and leaves the order of the logits.
    logits = jnp.arange(8.0)[None]
    found = jit_kept(logits, inputs_of([SamplingParams(1, 1e30, 0, top_p)]))
    assert found.tolist() == [[False] * (8 - kept) + [True] * kept]


def test_temperature_comes_before_the_filters() -> None:
    logits = jnp.log(jnp.array([[0.6, 0.3, 0.1]] * 2))
    rows = [SamplingParams(1, 1.0, 0, 0.55), SamplingParams(1, 4.0, 0, 0.55)]
    assert jit_kept(logits, inputs_of(rows)).sum(axis=1).tolist() == [1, 2]


# Drawing


def test_greedy_takes_the_first_of_the_best_and_ignores_filters() -> None:
    logits = jnp.array([[0.0, 5.0, 5.0, 1.0]] * 3, jnp.bfloat16)
    rows = [SamplingParams(1), SamplingParams(1, 0.0, 1, 0.1, 1.0), SamplingParams(1, 1e-42)]
    assert jit_sample(logits, inputs_of(rows)).tolist() == [1, 1, 1]
    assert greedy(logits).tolist() == [1, 1, 1]
    assert greedy(logits).dtype == jit_sample(logits, inputs_of(rows)).dtype == jnp.int32


@pytest.mark.parametrize(
    "filter_", [{"top_k": 1}, {"top_p": 1e-6}, {"top_p": 1e-300}, {"min_p": 1.0}]
)
def test_a_filter_that_leaves_one_token_is_greedy(filter_: dict[str, Any]) -> None:
    logits = jnp.asarray(np.random.default_rng(0).normal(size=(64, 97)), jnp.float32)
    rows = [SamplingParams(temperature=1.5, seed=i, **filter_) for i in range(64)]
    assert jit_sample(logits, inputs_of(rows)).tolist() == greedy(logits).tolist()


@pytest.mark.parametrize("drawn", [False, True], ids=["all greedy", "some drawn"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_row_that_is_not_finite_has_no_token(drawn: bool, dtype: str) -> None:
    clean = np.random.default_rng(0).normal(size=(9, 30)).astype(np.float32)
    clean[0, 3:] = -np.inf  # which only rules tokens out
    broken = clean.copy()
    broken[1, 29] = broken[2, 0] = broken[4] = np.nan
    broken[5, 11] = np.inf
    broken[6] = -np.inf
    broken[8, 4:6] = np.nan, np.inf
    filters = SamplingParams(temperature=1.0, top_k=5, top_p=0.9, min_p=0.1)
    rows = (
        [SamplingParams(), SamplingParams(temperature=1.0), filters]
        if drawn
        else [SamplingParams()]
    )
    inputs = inputs_of([rows[i % len(rows)] for i in range(9)])
    expected = np.asarray(jit_sample(jnp.asarray(clean, dtype), inputs))
    expected = np.where(np.isin(range(9), [0, 3, 7]), expected, NOT_FINITE)
    assert jit_sample(jnp.asarray(broken, dtype), inputs).tolist() == expected.tolist()
    assert (expected[[0, 3, 7]] >= 0).all()


def test_greedy_and_drawn_rows_mix() -> None:
    logits = jnp.zeros((64, 50)).at[:, 7].set(0.5)
    rows = [SamplingParams(temperature=float(i % 2), seed=i) for i in range(64)]
    tokens = np.asarray(jit_sample(logits, inputs_of(rows)))
    assert (tokens[::2] == 7).all()
    assert len(set(tokens[1::2].tolist())) > 10


@pytest.mark.parametrize("temperature", [1e-37, 1e-3, 1.0, 1e38])
def test_extreme_logits_give_a_token_that_is_allowed(temperature: float) -> None:
    lowest, highest = np.finfo(np.float32).min, np.finfo(np.float32).max
    logits = np.full((3, 40), -np.inf, np.float32)
    logits[0, 5] = lowest
    logits[1, [3, 9]] = highest
    logits[2, :3] = np.array([highest, lowest, 1e-40], np.float32)
    limits = ((0, 1.0), (3, 0.9), (60, 1.0))
    rows = [SamplingParams(1, temperature, k, p, seed=k) for k, p in limits]
    for step in range(20):
        tokens = jit_sample(logits, inputs_of(rows, step)).tolist()
        assert tokens[0] == 5 and tokens[1] in (3, 9)
        assert tokens[2] in ((0, 1, 2) if temperature > 1 else (0,))


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(temperature=1.0),
        SamplingParams(temperature=2.0, top_k=4),
        SamplingParams(temperature=0.7, top_p=0.8),
        SamplingParams(temperature=1.0, min_p=0.2),
    ],
)
@pytest.mark.parametrize("vary", ["seed", "step"])
def test_draws_follow_the_distribution(params: SamplingParams, vary: str) -> None:
    draws = 20_000
    row = np.array([1.0, 0.2, -0.5, 2.0, -3.0, 1.5, 0.0, -1.0], np.float32)
    keep = reference_kept(row, params.temperature, params.top_k, params.top_p, params.min_p)
    weight = np.where(keep, np.exp(row.astype(np.float64) / params.temperature), 0)
    numbers, fixed = list(range(draws)), [11] * draws
    seeds, steps = (numbers, fixed) if vary == "seed" else (fixed, numbers)
    inputs = SamplingInputs.from_rows([params] * draws, seeds, steps, draws)
    tokens = np.asarray(jit_sample(np.tile(row, (draws, 1)), inputs))
    counts = np.bincount(tokens, minlength=len(row))
    expected = draws * weight / weight.sum()
    assert (counts[~keep] == 0).all()
    chi_square = ((counts - expected)[keep] ** 2 / expected[keep]).sum()
    assert chi_square < 27  # 7 or fewer degrees of freedom: exceeded once in 2,700 by chance


@settings(max_examples=20, deadline=None)
@given(st.integers(0, MAX_SEED), st.integers(0, 5000), st.sampled_from([1, 3, 8]), st.data())
def test_a_row_draws_the_same_token_in_any_batch(
    seed: int, step: int, size: int, data: st.DataObject
) -> None:
    place = data.draw(st.integers(0, size - 1))
    rng = np.random.default_rng(seed % 1000)
    logits = rng.normal(size=(size, 1003)).astype(np.float32) * 2
    params = SamplingParams(temperature=0.9, top_k=200, top_p=0.95, min_p=0.01)
    others = [SamplingParams(1), SamplingParams(1, 1.0), SamplingParams(1, 1.0, 3)]
    rows = [others[i % 3] for i in range(size)]
    rows[place] = params
    seeds, steps = list(range(size)), [0] * size
    seeds[place], steps[place] = seed, step
    batch = jit_sample(logits, SamplingInputs.from_rows(rows, seeds, steps, size))
    inputs = SamplingInputs.from_rows([params], [seed], [step], 1)
    alone = jit_sample(logits[place : place + 1], inputs)
    assert batch[place] == alone[0]


def test_kept_set_is_the_same_bit_for_bit_in_any_batch() -> None:
    # So flat a distribution puts the limits of top-p within the rounding of a float32 sum.
    logits = np.random.default_rng(1).normal(size=(16, 30_000)).astype(np.float32) * 0.01
    rows = [SamplingParams(temperature=1.0, top_p=0.5 + i / 64) for i in range(16)]
    whole = np.asarray(jit_kept(logits, inputs_of(rows)))
    for start, size in ((0, 1), (15, 1), (3, 7)):
        part = jit_kept(logits[start : start + size], inputs_of(rows[start : start + size]))
        assert np.array_equal(part, whole[start : start + size])


# The random bits of token 62 of 64 are 0 or 1 with this seed: one draw in 2^31 is so small.
RARE_SEED, RARE_TOKEN = 17061364, 62


def test_the_smallest_draw_is_half_a_step() -> None:
    """Its exponential is 2^-32: not 0, which would divide by it, nor a whole step."""
    logits = np.zeros((1, 64), np.float32)
    inputs = inputs_of([SamplingParams(temperature=1.0, seed=RARE_SEED)])
    assert jit_sample(logits, inputs)[0] == RARE_TOKEN
    key = jax.random.fold_in(jax.random.wrap_key_data(inputs.seed[0], impl="threefry2x32"), 0)
    bits = np.asarray(threefry_2x32(jax.random.key_data(key), jnp.arange(64, dtype=jnp.uint32)))
    assert bits[RARE_TOKEN] in (0, 1)
    # The best of the others has the smallest exponential.
    exponential = -np.log1p(-((bits >> 1) + 0.5) * 2.0**-31)
    other = np.argsort(exponential)[1]
    for factor, winner in ((1.2, RARE_TOKEN), (0.8, other)):
        even = np.log(factor * 2.0**-32 / exponential[other])
        logits[0, RARE_TOKEN] = even
        assert jit_sample(logits, inputs)[0] == winner
    # A token that is ruled out does not win by it.
    logits[0, RARE_TOKEN] = -np.inf
    assert jit_sample(logits, inputs)[0] == other


def test_the_largest_draw_is_below_one() -> None:
    """Those bits of token 30 round to 1 in float32, of which the exponential would be infinite."""
    logits = jnp.zeros((1, 64)).at[0, 30].set(1.0)
    only = SamplingParams(temperature=1.0, top_k=1, seed=2324146)
    assert jit_sample(logits, inputs_of([only]))[0] == 30


def test_seed_words_and_step_all_matter() -> None:
    logits = jnp.zeros((4, 10_000))
    params = [SamplingParams(temperature=1.0)] * 4
    inputs = SamplingInputs.from_rows(params, [1, 2, 1 + 2**32, 1], [0, 0, 0, 1], 4)
    assert len(set(jit_sample(logits, inputs).tolist())) == 4


def test_one_program_serves_every_setting() -> None:
    traces = 0

    @jax.jit
    def counted(logits: jax.Array, inputs: SamplingInputs) -> jax.Array:
        nonlocal traces
        traces += 1
        return sample(logits, inputs)

    logits = jnp.zeros((2, 16))
    for setting in ((0.0,), (1.0, 5), (2.0, 0, 0.5, 0.1)):
        counted(logits, inputs_of([SamplingParams(1, *setting), SamplingParams()]))
    assert traces == 1
