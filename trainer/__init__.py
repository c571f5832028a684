"""Training: from batches to Megatron steps, checkpoints, weights and weight-version events.

This module defines the trainer's errors. Each ends the process; the supervisor restarts it at the last checkpoint.

TrainerError
├── UnsupportedModel     the model folder describes something that the mapping to Megatron does not cover
├── ModelDamaged         a file of the model folder is missing, truncated, or not what its name says
├── LayoutUnfit          the model cannot be sharded as the settings say, or this machine lacks a device for a rank
├── WeightsMismatch      names or shapes of Hugging Face weights differ from the model's
├── TeacherUnfit         the teacher has another tokenizer than the policy, or the ranks cannot shard it
├── ExpertsUnfit         recorded experts are not those of this model's layers, or a sample is not where a batch says
├── TokensUnfit          a batch has tokens that the model lacks, or its sessions were sampled with another tokenizer
├── ImagesUnfit          an image of a sample cannot be read, or has another number of tokens than the sample says
├── BatchGap             the next manifest is not the next batch
├── BooksOff             the ranks together did not train the number of tokens in the manifest
├── RankLost             a rank ended, or hung before it had joined the others
├── Diverged             several steps in a row had no finite gradient
├── CheckpointUnusable   missing, incomplete, of another model or, by place, of another layout
│   └── CheckpointDamaged    a file is missing or was altered: the checkpoint before it is used
├── CheckpointFailed     a rank could not write its part
├── ExportFailed         the files of a weight version could not be written
└── Superseded           a newer generation of the trainer owns the checkpoints

A batch file that differs from its manifest raises infra.batch_files.CorruptBatch; it is never skipped.
"""

from __future__ import annotations

if __name__ == "trainer":
    raise ImportError("import turnlog.trainer, not trainer: a twin import copies every class")

LOCAL_RANK = "LOCAL_RANK"
"""Environment variable with a rank's number on its machine, which selects its device; torchrun sets it too."""


class TrainerError(Exception):
    """Base of the errors above."""


class UnsupportedModel(TrainerError):
    """The model is not supported. The message names the key of config.json and what is supported."""


class ModelDamaged(TrainerError):
    """A file of the model folder is damaged. The message names the file and the defect."""


class LayoutUnfit(TrainerError):
    """The layout does not fit model or machine. Raised before any rank starts; names the setting and what it must
    divide.
    """


class WeightsMismatch(TrainerError):
    """The weights do not match the model. The message names the first tensor that differs."""


class TeacherUnfit(TrainerError):
    """The teacher does not fit the policy. Raised before any rank starts; names the folder and what must be equal."""


class ExpertsUnfit(TrainerError):
    """Recorded experts do not fit. The message names the sample, the token and the layer."""


class TokensUnfit(TrainerError):
    """Tokens do not fit the model. The message names batch, sample and token, or the session and both tokenizers."""


class ImagesUnfit(TrainerError):
    """An image does not fit. The message names the sample and the image."""


class BatchGap(TrainerError):
    """The topic sample-batches does not continue where the checkpoint ended."""


class BooksOff(TrainerError):
    """The token counts of ranks and manifest differ. Raised before the optimizer steps, so that no weights result from
    it.
    """


class RankLost(TrainerError):
    """A rank was lost. The message names the rank, or the time limit; a restart starts all ranks again."""


class Diverged(TrainerError):
    """Training diverged. The message names the last batch and what to do; the weights are those before it."""


class CheckpointUnusable(TrainerError):
    """The checkpoint cannot be used. The message names the folder; remove it to start from [model] path."""


class CheckpointDamaged(CheckpointUnusable):
    """A file of the checkpoint is damaged. The message names the file; if one rank raises this, every rank does."""


class CheckpointFailed(TrainerError):
    """The checkpoint could not be written. The message names the folder and the reason; the previous checkpoint
    remains.
    """


class ExportFailed(TrainerError):
    """The export could not be written. The message names the folder and the reason, usually a full disk. The version
    was never published.
    """


class Superseded(TrainerError):
    """A newer generation owns the run: this process is a zombie and must end."""
