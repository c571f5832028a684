"""A cut is taken between transactions, never inside one."""

from __future__ import annotations

import json

from tests.fakes.memory_log import MemoryLog
from turnlog.infra.archive import Cut, live_cut
from turnlog.infra.log import Commit, Partition, TopicSpec
from turnlog.names import ConsumerGroup
from turnlog.processors.core.fold.unit import FoldName, LowWaterMarks, encode_marks
from turnlog.processors.core.fold_versions import INPUTS, OUTPUTS


def commits(unit: int, high: int) -> dict[Partition, Commit]:
    marks = LowWaterMarks(low=dict.fromkeys(INPUTS, 1), high=dict.fromkeys(INPUTS, high))
    return {Partition(t, unit): Commit(1, encode_marks(marks, FoldName("1", "0" * 64), t)) for t in INPUTS}


async def test_a_cut_says_how_far_a_unit_was_folded_and_where_the_outputs_of_that_end() -> None:
    log = MemoryLog()
    await log.create_topics([TopicSpec(name, 2, 1, {}) for name in (*INPUTS, *OUTPUTS)])
    nothing = await live_cut(log, "run", 1)
    assert nothing == Cut("run.assembler", 1, dict.fromkeys(INPUTS, 0), dict.fromkeys(OUTPUTS, 0), {})
    async with log.transactor("run.assembler.1") as transactor:
        for number in (1, 2):
            await transactor.begin()
            await transactor.send(OUTPUTS[0], 1, b"k", b"tree")
            assert await live_cut(log, "run", 1) is None
            assert await live_cut(log, "run", 0) is not None
            await transactor.offsets(ConsumerGroup.ASSEMBLER.format(run="run"), commits(1, 5 * number))
            await transactor.commit()
            cut = await live_cut(log, "run", 1)
            assert cut is not None
            assert cut.high == dict.fromkeys(INPUTS, 5 * number)
            assert cut.ends == {OUTPUTS[0]: 2 * number, OUTPUTS[1]: 0}
            assert cut.order > nothing.order
            assert Cut.from_json(json.loads(json.dumps(cut.as_json()))) == cut
            nothing = cut
