"""What is known to block or slow a program when it runs, and is in neither its order nor its price.

Read from XLA's sources and from what others measured; each line names where.
"""

from __future__ import annotations

from collections.abc import Sequence

from tbo_jax.schedule import cost
from tbo_jax.schedule.hlo import Module
from tbo_jax.schedule.targets import Target

MOST_ONE_SHOT = 8  # GPUs that XLA's kernel for a ragged all-to-all reaches


def run_time_notes(
    module: Module, target: Target, device_ids: Sequence[int] | None = None
) -> list[str]:
    """Sentences about a program on a machine; none if nothing is known."""
    if target.platform != "cuda":
        return []
    groups = [
        group
        for computation in module.computations.values()
        for instruction in computation.instructions
        if cost.base_opcode(instruction) == "ragged-all-to-all"
        for group in cost.groups(instruction, module.num_devices)
    ]
    if not groups:
        return []
    per_node = target.num_devices // target.num_nodes
    nodes = [
        len(
            {(device if device_ids is None else device_ids[device]) // per_node for device in group}
        )
        for group in groups
    ]
    if max(nodes) > 1 or max(map(len, groups)) > MOST_ONE_SHOT:
        return [
            "ragged all-to-all over nodes, or over more than 8 GPUs: XLA copies the sizes to the "
            "host and waits for them in each (openxla/xla#41903), so the real step is slower"
        ]
    return [
        "ragged all-to-all of up to 8 GPUs of a node: XLA's one-shot kernel was measured at 2 % of "
        "the link on 8 B200 (openxla/xla#33386) and 7.7 times slower than NCCL "
        "(marin-community/marin#7012); time it, or compare --transport all_to_all"
    ]
