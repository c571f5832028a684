"""An export holds no more in memory than it writes at once."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

SHARD = 16 << 20
PEAK = """
import dataclasses, json, re, sys
from pathlib import Path
from turnlog.infra.tensors.files import write_weights
from turnlog.trainer import weights
from turnlog.trainer.launch import process_group
from turnlog.trainer.model import build_model, model_config
from turnlog.trainer.plan import LearnerOptions
from turnlog.trainer.shape import TINY

def resident(what):
    return int(re.search(what + r":\\s+(\\d+) kB", Path("/proc/self/status").read_text())[1]) << 10

def more(work):
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    before = resident("VmRSS")
    held = work()
    return resident("VmHWM") - before, held

def written(model, shape):
    export = weights.Export(model, shape)
    contents = ((name, weights._bytes(tensor)) for name, tensor in export)
    return write_weights(Path(sys.argv[1]), export.specs, contents, shard_bytes=int(sys.argv[2]))

if __name__ == "__main__":
    shape = dataclasses.replace(TINY, hidden=512, ffn=1536, layers=8)
    options = LearnerOptions()
    with process_group():
        weights.mcore.tensor_parallel.model_parallel_cuda_manual_seed(0)
        with weights.mcore.quiet():
            model = build_model(shape, model_config(shape, options), vocabulary_multiple=1)
        written(model, shape)
        streamed, files = more(lambda: written(model, shape))
        whole, _ = more(lambda: weights.export_weights(model, shape))
    print(json.dumps([streamed, whole, 4 * files.parameters, len(files.sha256)]))
"""


def test_an_export_takes_less_than_one_and_a_half_shards_of_memory_beside_the_model(tmp_path: Path) -> None:
    command = [sys.executable, "-W", "ignore", "-c", PEAK, str(tmp_path), str(SHARD)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    streamed, whole, model, names = json.loads(done.stdout.splitlines()[-1])
    assert model > 4 * SHARD
    assert names >= 1 + model // SHARD
    assert streamed < 1.5 * SHARD
    assert whole > 2 * SHARD, "what is measured shows a model in memory"
