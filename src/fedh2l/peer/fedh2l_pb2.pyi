from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from typing import ClassVar as _ClassVar, Optional as _Optional

DESCRIPTOR: _descriptor.FileDescriptor

class Hello(_message.Message):
    __slots__ = ("protocol", "name", "digest", "canonical", "round")
    PROTOCOL_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    CANONICAL_FIELD_NUMBER: _ClassVar[int]
    ROUND_FIELD_NUMBER: _ClassVar[int]
    protocol: int
    name: str
    digest: bytes
    canonical: str
    round: int
    def __init__(self, protocol: _Optional[int] = ..., name: _Optional[str] = ..., digest: _Optional[bytes] = ..., canonical: _Optional[str] = ..., round: _Optional[int] = ...) -> None: ...

class Signal(_message.Message):
    __slots__ = ("posteriors",)
    POSTERIORS_FIELD_NUMBER: _ClassVar[int]
    posteriors: bytes
    def __init__(self, posteriors: _Optional[bytes] = ...) -> None: ...

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
