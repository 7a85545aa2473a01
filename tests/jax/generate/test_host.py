"""The host's side of generation: pages, drafts, sampling."""

from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tsmla_jax.generate.drafting import NgramDrafter
from tsmla_jax.generate.pages import PageAllocator, PageTable, pages_for
from tsmla_jax.generate.plan import LEAST_TEMPERATURE
from tsmla_jax.generate.sampling import NOT_FINITE, select_tokens


@given(st.integers(1, 40), st.integers(1, 7), st.lists(st.tuples(st.booleans(), st.integers(1, 60)), max_size=40))
def test_no_page_has_two_owners_and_none_is_lost(
    num_pages: int, page_size: int, actions: list[tuple[bool, int]]
) -> None:
    """Texts come, grow to their reservation or stop before it, and go, in any order."""
    allocator = PageAllocator(num_pages)
    tables: list[PageTable] = []
    reserved: list[int] = []
    for arrive, tokens in actions:
        if arrive:
            need = pages_for(tokens, page_size)
            free = num_pages - sum(reserved)
            assert allocator.reserve(need) == (need <= free)
            if need <= free:
                tables.append(PageTable(allocator, page_size, need))
                reserved.append(need)
        elif tables:
            index = tokens % len(tables)
            tables[index].grow(min(tokens, reserved[index] * page_size))
            if tokens % 3 == 0:
                tables.pop(index).release()
                reserved.pop(index)
        owned = [page for table in tables for page in table.pages]
        assert len(set(owned)) == len(owned) and all(0 <= page < num_pages for page in owned)
        assert allocator.available == num_pages - sum(reserved)
    for table in tables:
        table.release()
    assert allocator.available == num_pages and allocator.peak <= num_pages


def test_a_table_stays_within_its_reservation() -> None:
    allocator = PageAllocator(4)
    assert allocator.reserve(3)
    table = PageTable(allocator, 4, 3)
    table.grow(9)
    assert len(set(table.pages)) == 3
    with pytest.raises(ValueError, match=r"tokens = 13; legal: at most 12"):
        table.grow(13)
    with pytest.raises(ValueError, match="reservation"):
        PageAllocator(1).take()
    with pytest.raises(ValueError, match="num_pages = 0"):
        PageAllocator(0)


def plain_draft(text: list[int], count: int) -> list[int]:
    """The longest suffix of at most 3 tokens that came before, continued from its latest earlier place."""
    for size in (3, 2, 1):
        for start in range(len(text) - size - 1, -1, -1):
            if size <= len(text) and text[start : start + size] == text[-size:]:
                copy = list(text)
                for offset in range(count):
                    copy.append(copy[start + size + offset])
                return copy[len(text) :]
    return []


@given(st.lists(st.integers(0, 3), max_size=30), st.integers(0, 5), st.integers(0, 30))
def test_drafts_continue_the_last_repetition(text: list[int], count: int, cut: int) -> None:
    drafter = NgramDrafter(text[:cut])
    drafter.extend(text[cut:])
    assert drafter.draft(count) == plain_draft(text, count)


def test_draft_sizes_are_checked() -> None:
    with pytest.raises(ValueError, match="min_ngram = 4, max_ngram = 3"):
        NgramDrafter([], max_ngram=3, min_ngram=4)


choose = jax.jit(select_tokens, static_argnames="greedy")


def sample(logits: np.ndarray, seed: int = 0, temperature: float = 1.0, top_p: float = 1.0) -> np.ndarray:
    """One token a row; the row's number is its position."""
    rows = np.arange(len(logits), dtype=np.int32)
    return np.asarray(
        choose(
            jnp.asarray(logits), np.zeros_like(rows), rows, np.uint32(seed), np.float32(temperature),
            np.float32(top_p), greedy=False,
        )
    )  # fmt: skip


def test_samples_follow_the_tempered_nucleus() -> None:
    logits = np.log(np.array([0.05, 0.4, 0.1, 0.25, 0.2], np.float32))
    rows = np.tile(logits, (5000, 1))
    for temperature, top_p, kept in ((1.0, 1.0, [0, 1, 2, 3, 4]), (1.0, 0.6, [1, 3]), (0.5, 1.0, [0, 1, 2, 3, 4])):
        expected = np.zeros(5)
        expected[kept] = np.exp(logits[kept] / temperature)
        expected /= expected.sum()
        counts = Counter(sample(rows, temperature=temperature, top_p=top_p).tolist())
        observed = np.array([counts[token] for token in range(5)]) / len(rows)
        np.testing.assert_allclose(observed, expected, atol=5 * 0.5 / len(rows) ** 0.5)
        assert not observed[expected == 0].any()
    for extreme in ({"top_p": 1e-6}, {"top_p": 1e-50}, {"temperature": LEAST_TEMPERATURE}):  # 1e-50 is 0 in f32
        assert set(sample(rows[:100], **extreme).tolist()) == {1}


def test_logits_without_a_largest_number_choose_nothing() -> None:
    logits = np.array([[0, 1], [np.nan, 1], [0, np.nan], [np.inf, 0], [-np.inf, -np.inf], [-np.inf, 2]], np.float32)
    none = np.zeros(len(logits), np.int32)
    greedy = choose(jnp.asarray(logits), none, none, 0, 0.0, 1.0, greedy=True).tolist()
    assert greedy == [1, *[NOT_FINITE] * 4, 1]
    for top_p in (0.5, 1.0):
        assert sample(logits, top_p=top_p)[1:].tolist() == greedy[1:]


def test_a_sample_depends_on_seed_request_and_position_alone() -> None:
    rng = np.random.default_rng(0)
    logits = rng.standard_normal((64, 50), np.float32)
    all_rows = sample(logits)
    rows = np.arange(64, dtype=np.int32)[::-7]
    some = choose(
        jnp.asarray(logits[rows]), np.zeros_like(rows), rows, np.uint32(0), np.float32(1), np.float32(1), greedy=False
    )
    assert np.asarray(some).tolist() == all_rows[rows].tolist()
    assert (sample(logits, seed=1) != all_rows).any()


def test_greedy_takes_the_lowest_id_among_equals() -> None:
    logits = jnp.asarray([[0.0, 2.0, 2.0], [3.0, 1.0, 3.0]], jnp.bfloat16)
    none = jnp.zeros(2, jnp.int32)
    assert choose(logits, none, none, 0, 0.0, 1.0, greedy=True).tolist() == [1, 0]
    assert choose(jnp.asarray([[1.0, 1.001]]), none[:1], none[:1], 0, 0.0, 1.0, greedy=True) == 1  # not equal
