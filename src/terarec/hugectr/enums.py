# SPDX-License-Identifier: Apache-2.0
"""HugeCTR's enumerations: every member of every release.

The members are also names of the package itself (``hugectr.Adam``), unless two enumerations share the name.
"""

from __future__ import annotations

from enum import Enum, EnumMeta
from typing import Any

from terarec.spec.checks import nearest, nearest_or_all


class _NamesType(EnumMeta):
    """Metaclass that reports an unknown member with the existing ones."""

    def __getattr__(cls, name: str) -> Any:
        members = cls.__dict__.get("_member_map_", {})
        if name in members:  # Python 3.11 looks members up here
            return members[name]
        # Python looks for names of its own protocols, such as `__wrapped__`: those are not misspelt members.
        if name.startswith("_"):
            raise AttributeError(name)
        # Case is what scripts get wrong most: it is ignored, and the exact spelling suggested.
        folded = {member.lower(): member for member in members}
        hint = nearest_or_all(folded.get(nearest(name.lower(), folded) or "", name), list(members))
        raise AttributeError(f"{cls.__name__} has no {name!r}, {hint}")


class Names(Enum, metaclass=_NamesType):
    """Base of HugeCTR's enumerations; as there, a member is an integer where one is needed."""

    def __int__(self) -> int:
        return int(self.value)

    __index__ = __int__


class Error_t(Names):  # noqa: N801
    """Kinds of errors; `terarec.hugectr.errors` has an exception for each member that can occur here."""

    Success = 0
    FileCannotOpen = 1
    BrokenFile = 2
    OutOfMemory = 3
    OutOfBound = 4
    WrongInput = 5
    IllegalCall = 6
    NotInitialized = 7
    UnSupportedFormat = 8
    InvalidEnv = 9
    MpiError = 10
    CublasError = 11
    CudnnError = 12
    CudaDriverError = 13
    CudaRuntimeError = 14
    NcclError = 15
    DataCheckError = 16
    UnspecificError = 17
    EndOfFile = 18


class Check_t(Names):  # noqa: N801
    """Checksums of the records of a Norm file: present or not."""

    Sum = 0
    Non = 1


class DataReaderType_t(Names):  # noqa: N801
    """Format of the data files."""

    Norm = 0
    Raw = 1
    Parquet = 2
    RawAsync = 3


class SourceType_t(Names):  # noqa: N801
    """Form in which a source names its files."""

    FileList = 0
    Mmap = 1
    Parquet = 2


class FileSystemType_t(Names):  # noqa: N801
    """File system of files; releases 3.4 to 4.0 called it DataSourceType_t."""

    Local = 0
    HDFS = 1
    S3 = 2
    GCS = 3
    Other = 4


DataSourceType_t = FileSystemType_t


class TrainPSType_t(Names):  # noqa: N801
    """Place of the tables of an embedding training cache."""

    Staged = 0
    Cached = 1


class Embedding_t(Names):  # noqa: N801
    """Kind of an embedding."""

    DistributedSlotSparseEmbeddingHash = 0
    LocalizedSlotSparseEmbeddingHash = 1
    LocalizedSlotSparseEmbeddingOneHot = 2
    HybridSparseEmbedding = 3


class Initializer_t(Names):  # noqa: N801
    """Initializers of weights."""

    Default = 0
    Uniform = 1
    XavierNorm = 2
    XavierUniform = 3
    Zero = 4


class Layer_t(Names):  # noqa: N801
    """Kind of a dense layer."""

    BatchNorm = 0
    LayerNorm = 1
    BinaryCrossEntropyLoss = 2
    Reshape = 3
    Select = 4
    Concat = 5
    CrossEntropyLoss = 6
    Dropout = 7
    ElementwiseMultiply = 8
    ELU = 9
    InnerProduct = 10
    MLP = 11
    Interaction = 12
    MultiCrossEntropyLoss = 13
    ReLU = 14
    ReLUHalf = 15
    Sigmoid = 16
    Slice = 17
    WeightMultiply = 18
    FmOrder2 = 19
    Add = 20
    ReduceSum = 21
    Softmax = 22
    Gather = 23
    PReLU_Dice = 24
    GRU = 25
    MatrixMultiply = 26
    MultiHeadAttention = 27
    Scale = 28
    FusedReshapeConcat = 29
    FusedReshapeConcatGeneral = 30
    Sub = 31
    ReduceMean = 32
    MultiCross = 33
    Cast = 34
    SequenceMask = 35
    FusedInnerProduct = 36


# Older spellings. Aliases inside the class would be listed by `__members__`, where scripts look for kinds of layers.
LAYER_SYNONYMS = {"DotProduct": Layer_t.ElementwiseMultiply, "Multiply": Layer_t.WeightMultiply}
for _synonym, _layer in LAYER_SYNONYMS.items():
    setattr(Layer_t, _synonym, _layer)


class GroupLayer_t(Names):  # noqa: N801
    """Kind of a group of dense layers."""

    GroupFusedInnerProduct = 0


class Alignment_t(Names):  # noqa: N801
    """Padding of keys by the asynchronous reader on a GPU."""

    Auto = 0
    Non = 1


class LrPolicy_t(Names):  # noqa: N801
    """Learning-rate policies: only warm-up and decay."""

    fixed = 0


class Optimizer_t(Names):  # noqa: N801
    """Kind of an optimizer."""

    Ftrl = 0
    Adam = 1
    RMSProp = 2
    AdaGrad = 3
    MomentumSGD = 4
    Nesterov = 5
    SGD = 6


class Update_t(Names):  # noqa: N801
    """Rows of a table that a step updates."""

    Local = 0
    Global = 1
    LazyGlobal = 2


class Activation_t(Names):  # noqa: N801
    """Activation behind a fully connected layer."""

    Relu = 0
    Non = 1


class FcPosition_t(Names):  # noqa: N801
    """Position of a FusedInnerProduct in its chain."""

    Non = 0
    Head = 1
    Body = 2
    Tail = 3
    Isolated = 4


class Regularizer_t(Names):  # noqa: N801
    """Regularization of the weights, which a loss adds."""

    L1 = 0
    L2 = 1


class MetricsRawType(Names):
    """Input of a metric."""

    Loss = 0
    Pred = 1
    Label = 2


class MetricsType(Names):
    """Metrics of an evaluation."""

    AUC = 0
    AverageLoss = 1
    HitRate = 2
    NDCG = 3
    SMAPE = 4


class DeviceLayout(Names):
    """Order of the devices of several nodes."""

    LocalFirst = 0
    NodeFirst = 1


class AllReduceAlgo(Names):
    """Algorithm of the all-reduce of dense gradients."""

    OneShot = 0
    NCCL = 1


class Distribution_t(Names):  # noqa: N801
    """Distribution of generated keys."""

    Uniform = 0
    PowerLaw = 1


class PowerLaw_t(Names):  # noqa: N801
    """Exponent of the power law of generated keys: 0.9, 1.1, 1.3, or the user's."""

    Long = 0
    Medium = 1
    Short = 2
    Specific = 3


class Tensor_t(Names):  # noqa: N801
    """Batch whose tensors `Model.check_out_tensor` returns."""

    Train = 0
    Evaluate = 1


class CommunicationStrategy(Names):
    """Exchange of vectors between the GPUs of an embedding collection."""

    Uniform = 0
    Hierarchical = 1


class CompressionStrategy(Names):
    """Content that GPUs of an embedding collection send."""

    Reduction = 0
    Unique = 1


class DataReaderSparse_t(Names):  # noqa: N801
    """Distribution of keys over GPUs by readers up to 3.0."""

    Distributed = 0
    Localized = 1


class HybridEmbeddingType(Names):
    """Placement of infrequent rows of a hybrid embedding."""

    Distributed = 0


class CommunicationType(Names):
    """Network between the GPUs of a hybrid embedding."""

    IB_NVLink_Hier = 0
    IB_NVLink = 1
    NVLink_SingleNode = 2


class DatabaseType_t(Names):  # noqa: N801
    """Store behind the parameter server."""

    disabled = 0
    hash_map = 1
    parallel_hash_map = 2
    multi_process_hash_map = 3
    redis_cluster = 4
    rocks_db = 5


class Database_t(Names):  # noqa: N801
    """Stores behind the parameter server in release 3.2."""

    Redis = 0
    RocksDB = 1
    Local = 2
    Hierarchy = 3


class DatabaseHashMapAlgorithm_t(Names):  # noqa: N801
    """Hash map of a store in memory in releases 3.3 to 3.6."""

    stl = 0
    phm = 1


CPUMemoryHashMapAlgorithm_t = DatabaseHashMapAlgorithm_t


class DatabaseOverflowPolicy_t(Names):  # noqa: N801
    """Rows that a full store drops."""

    evict_oldest = 0
    evict_random = 1
    evict_least_used = 2


class UpdateSourceType_t(Names):  # noqa: N801
    """Source of a parameter server's updates."""

    null = 0
    kafka_message_queue = 1


class EmbeddingCacheType_t(Names):  # noqa: N801
    """Form of the cache of rows on a device."""

    Dynamic = 0
    UVM = 1
    Static = 2
    stochastic = 3


class InferType(Names):
    """Caller of a session in release 3.0."""

    Triton = 0
    Other = 1


ENUMS: tuple[type[Enum], ...] = tuple(Names.__subclasses__())
"""Every enumeration, once, in the order of this file."""


def owners_of(member: str) -> list[Enum]:
    """Return the members named `member`, one for each enumeration that has one."""
    return [enum[member] for enum in ENUMS if member in enum.__members__]
