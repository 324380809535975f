from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Hello(_message.Message):
    __slots__ = ("protocol", "name", "round", "finished", "agreements")
    PROTOCOL_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    ROUND_FIELD_NUMBER: _ClassVar[int]
    FINISHED_FIELD_NUMBER: _ClassVar[int]
    AGREEMENTS_FIELD_NUMBER: _ClassVar[int]
    protocol: int
    name: str
    round: int
    finished: bool
    agreements: _containers.RepeatedCompositeFieldContainer[Agreement]
    def __init__(self, protocol: _Optional[int] = ..., name: _Optional[str] = ..., round: _Optional[int] = ..., finished: bool = ..., agreements: _Optional[_Iterable[_Union[Agreement, _Mapping]]] = ...) -> None: ...

class Agreement(_message.Message):
    __slots__ = ("digest", "version", "from_round", "fields")
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    FROM_ROUND_FIELD_NUMBER: _ClassVar[int]
    FIELDS_FIELD_NUMBER: _ClassVar[int]
    digest: bytes
    version: int
    from_round: int
    fields: bytes
    def __init__(self, digest: _Optional[bytes] = ..., version: _Optional[int] = ..., from_round: _Optional[int] = ..., fields: _Optional[bytes] = ...) -> None: ...

class Signal(_message.Message):
    __slots__ = ("posteriors",)
    POSTERIORS_FIELD_NUMBER: _ClassVar[int]
    posteriors: bytes
    def __init__(self, posteriors: _Optional[bytes] = ...) -> None: ...

class Head(_message.Message):
    __slots__ = ("length", "hash", "signature")
    LENGTH_FIELD_NUMBER: _ClassVar[int]
    HASH_FIELD_NUMBER: _ClassVar[int]
    SIGNATURE_FIELD_NUMBER: _ClassVar[int]
    length: int
    hash: str
    signature: str
    def __init__(self, length: _Optional[int] = ..., hash: _Optional[str] = ..., signature: _Optional[str] = ...) -> None: ...

class Goodbye(_message.Message):
    __slots__ = ("round", "finished")
    ROUND_FIELD_NUMBER: _ClassVar[int]
    FINISHED_FIELD_NUMBER: _ClassVar[int]
    round: int
    finished: bool
    def __init__(self, round: _Optional[int] = ..., finished: bool = ...) -> None: ...

class Receipt(_message.Message):
    __slots__ = ("round",)
    ROUND_FIELD_NUMBER: _ClassVar[int]
    round: int
    def __init__(self, round: _Optional[int] = ...) -> None: ...

class Question(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class State(_message.Message):
    __slots__ = ("node", "federation", "version", "round", "rounds", "phase", "accuracy", "conflict_rate", "skipped", "bytes", "seconds", "peers", "turned_away")
    class TurnedAwayEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    NODE_FIELD_NUMBER: _ClassVar[int]
    FEDERATION_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    ROUND_FIELD_NUMBER: _ClassVar[int]
    ROUNDS_FIELD_NUMBER: _ClassVar[int]
    PHASE_FIELD_NUMBER: _ClassVar[int]
    ACCURACY_FIELD_NUMBER: _ClassVar[int]
    CONFLICT_RATE_FIELD_NUMBER: _ClassVar[int]
    SKIPPED_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    PEERS_FIELD_NUMBER: _ClassVar[int]
    TURNED_AWAY_FIELD_NUMBER: _ClassVar[int]
    node: str
    federation: str
    version: int
    round: int
    rounds: int
    phase: str
    accuracy: float
    conflict_rate: float
    skipped: int
    bytes: int
    seconds: float
    peers: _containers.RepeatedCompositeFieldContainer[Neighbour]
    turned_away: _containers.ScalarMap[str, int]
    def __init__(self, node: _Optional[str] = ..., federation: _Optional[str] = ..., version: _Optional[int] = ..., round: _Optional[int] = ..., rounds: _Optional[int] = ..., phase: _Optional[str] = ..., accuracy: _Optional[float] = ..., conflict_rate: _Optional[float] = ..., skipped: _Optional[int] = ..., bytes: _Optional[int] = ..., seconds: _Optional[float] = ..., peers: _Optional[_Iterable[_Union[Neighbour, _Mapping]]] = ..., turned_away: _Optional[_Mapping[str, int]] = ...) -> None: ...

class Neighbour(_message.Message):
    __slots__ = ("name", "address", "state", "reason", "round", "sent", "bytes", "dropped", "heard", "refused")
    class RefusedEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    NAME_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    ROUND_FIELD_NUMBER: _ClassVar[int]
    SENT_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    DROPPED_FIELD_NUMBER: _ClassVar[int]
    HEARD_FIELD_NUMBER: _ClassVar[int]
    REFUSED_FIELD_NUMBER: _ClassVar[int]
    name: str
    address: str
    state: str
    reason: str
    round: int
    sent: int
    bytes: int
    dropped: int
    heard: int
    refused: _containers.ScalarMap[str, int]
    def __init__(self, name: _Optional[str] = ..., address: _Optional[str] = ..., state: _Optional[str] = ..., reason: _Optional[str] = ..., round: _Optional[int] = ..., sent: _Optional[int] = ..., bytes: _Optional[int] = ..., dropped: _Optional[int] = ..., heard: _Optional[int] = ..., refused: _Optional[_Mapping[str, int]] = ...) -> None: ...
