"""Batches to Megatron steps to checkpoints to weights to weight-version events.

What can be wrong in the trainer. Each ends the process; the supervisor restarts it at the last checkpoint.

TrainerError
├── UnsupportedModel     the model folder describes something that the mapping to Megatron does not cover
├── ModelDamaged         a file of the model folder is gone, cut short, or not what its name says
├── LayoutUnfit          the model cannot be shared as the settings say, or this machine lacks a device for a rank
├── WeightsMismatch      names or shapes of Hugging Face weights differ from the model's
├── TeacherUnfit         the teacher reads other tokens than the policy writes, or the ranks cannot share it
├── ExpertsUnfit         recorded experts are not those of this model's layers, or a sample is not where a batch says
├── TokensUnfit          a batch has tokens that the model lacks, or its sessions were sampled with another tokenizer
├── ImagesUnfit          an image of a sample cannot be read, or takes other tokens than the sample says
├── BatchGap             the next manifest is not the next batch
├── BooksOff             the ranks together did not train the tokens that the manifest counts
├── RankLost             a rank ended, or hung before it had joined the others
├── Diverged             steps in a row had no finite gradient
├── CheckpointUnusable   missing, incomplete, of another model or, by place, of another layout
│   └── CheckpointDamaged    a file is gone, or not what was written: the one before it is taken
├── CheckpointFailed     a rank could not write its part
├── ExportFailed         the files of a weight version could not be written
└── Superseded           a newer incarnation of the trainer owns the checkpoints

A batch file that is not what its manifest says is infra.batch_files.CorruptBatch: it is never skipped.
"""

from __future__ import annotations

if __name__ == "trainer":
    raise ImportError("import turnlog.trainer, not trainer: a twin import copies every class")


class TrainerError(Exception):
    """Base of the tree above."""


class UnsupportedModel(TrainerError):
    """Names the key of config.json and what is supported."""


class ModelDamaged(TrainerError):
    """Names the file and what is wrong with it."""


class LayoutUnfit(TrainerError):
    """Raised before any rank starts; names the setting and what it must divide."""


class WeightsMismatch(TrainerError):
    """Names the first tensor that differs."""


class TeacherUnfit(TrainerError):
    """Raised before any rank starts; names the folder and what must be equal."""


class ExpertsUnfit(TrainerError):
    """Names the sample, the token and the layer."""


class TokensUnfit(TrainerError):
    """Names batch, sample and token, or the session and both tokenizers."""


class ImagesUnfit(TrainerError):
    """Names the sample and the image."""


class BatchGap(TrainerError):
    """sample-batches does not continue where the checkpoint ended."""


class BooksOff(TrainerError):
    """Raised before the optimizer moves, so that no weights come of it."""


class RankLost(TrainerError):
    """Names the rank, or the limit; a restart begins with all of them anew."""


class Diverged(TrainerError):
    """Names the last batch and what to do; the weights are those before it."""


class CheckpointUnusable(TrainerError):
    """Names the folder; remove it to start from [model] path."""


class CheckpointDamaged(CheckpointUnusable):
    """Names the file; every rank raises it when one does."""


class CheckpointFailed(TrainerError):
    """Names the folder and why; the checkpoint before it stands."""


class ExportFailed(TrainerError):
    """Names the folder and why, a full disk above all. The version was never there."""


class Superseded(TrainerError):
    """This process is a zombie and must end."""
