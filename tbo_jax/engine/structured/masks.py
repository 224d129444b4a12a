"""Runs the masks of requests with a structure between a step and its sampler."""

from __future__ import annotations

from collections.abc import Mapping

import jax
import numpy as np
from jax.sharding import Mesh
from llguidance import LLExecutor

from tbo_jax.engine.sampler import compile_mask
from tbo_jax.engine.scheduling.plan import StepPlan
from tbo_jax.engine.structured.structure import Structure
from tbo_jax.parallel.processes import over_ranks

Structures = Mapping[int, Structure]  # of the requests that have one, by request id


class TokenMasks:
    """Says which tokens may come next, and the compiled programs that take the others away."""

    def __init__(self, mesh: Mesh, vocab_size: int) -> None:
        """Args:
        mesh: of the engine.
        vocab_size: of the model.
        """
        self.mesh = mesh
        self.vocab_size = vocab_size
        self._programs: dict[int, jax.stages.Compiled] = {}  # by rows of the logits
        self._executor: LLExecutor | None = None

    def compile(self, rows: int) -> jax.stages.Compiled:
        """The program for a step with so many rows of logits."""
        if rows not in self._programs:
            self._programs[rows] = compile_mask(self.mesh, rows, self.vocab_size)
        return self._programs[rows]

    def change(
        self, plan: StepPlan, structures: Structures, logits: jax.Array, width: int = 1
    ) -> jax.Array:
        """The logits [R, L, V] with -inf for what the structures of a step's requests rule out.

        Args:
            plan: the step.
            structures: of its requests, each after all tokens of its request. One that cannot be
                followed any further says so in its `error`.
            logits: of the step; returned as they are if no request has a structure.
            width: rows of the logits that a sequence has.
        """
        found = []
        for one in plan.sampled_of(structures):
            structure = structures[one.request.request_id]
            if not one.request.is_finished and structure.error is None:
                # The first draft that is not allowed is masked, and none after it can stand.
                drafts = tuple(structure.acceptable(one.drafts))
                found.append((structure, one.rank, one.place * width, drafts))
        if not found:
            return logits
        ranks, rows = logits.shape[:2]
        masks = np.full((ranks, rows, -(-self.vocab_size // 32)), -1, np.int32)
        start = 0
        filled = self._fill(found)
        for structure, rank, row, drafts in found:
            count = len(drafts) + 1
            masks[rank, row : row + count] = structure.masks(filled[start : start + count])
            start += count
        changed: jax.Array = self.compile(rows)(logits, over_ranks(masks, self.mesh))
        return changed

    def _fill(self, found: list[tuple[Structure, int, int, tuple[int, ...]]]) -> np.ndarray:
        """The masks of llguidance, [N, W] int32: for each structure one, and one for each draft.

        What lies behind the end of a text is left as it is: all are allowed.
        """
        if self._executor is None:
            # Matchers of one grammar share what they find out, and what a limit counts depends on
            # the order. All processes have to find the same.
            self._executor = LLExecutor(1 if jax.process_count() > 1 else None)
        words = found[0][0].mask_words
        masks = np.full((sum(len(drafts) + 1 for *_, drafts in found), words), -1, np.int32)
        plain, drafting, start = [], [], 0
        for structure, _, _, drafts in found:
            if drafts:
                drafting.append((structure.matcher, start, list(drafts)))
            else:
                plain.append((structure.matcher, start))
            start += len(drafts) + 1
        size = masks.ctypes.data, words * masks.itemsize, len(masks)
        if plain:
            self._executor.unsafe_compute_mask_ptr(plain, *size)
        if drafting:
            self._executor.unsafe_compute_mask_ptr_with_draft_token(drafting, *size)
        return masks
