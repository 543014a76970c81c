"""Files and batches as clients see them."""

from typing import Literal

import msgspec

from everserve.gateway.store.batches import Batch
from everserve.gateway.store.files import File

ENDPOINTS = ("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/embeddings")
BatchStatus = Literal[
    "validating", "failed", "in_progress", "finalizing", "completed", "expired", "cancelling", "cancelled"
]


class FileView(msgspec.Struct, kw_only=True):
    id: str
    object: Literal["file"] = "file"
    bytes: int
    created_at: int
    expires_at: int
    filename: str
    purpose: str
    status: Literal["processed"] = "processed"

    @classmethod
    def of(cls, file: File) -> "FileView":
        return cls(
            id=file.id,
            bytes=file.bytes,
            created_at=file.created,
            expires_at=file.expires,
            filename=file.name,
            purpose=file.purpose,
        )


class FileList(msgspec.Struct, kw_only=True):
    object: Literal["list"] = "list"
    data: list[FileView]
    first_id: str | None
    last_id: str | None
    has_more: bool


class LineError(msgspec.Struct, kw_only=True):
    """Why a batch cannot run."""

    code: str
    line: int | None  # counted from 1
    message: str
    param: str | None = None


class LineErrors(msgspec.Struct, kw_only=True):
    object: Literal["list"] = "list"
    data: list[LineError]


class BatchCounts(msgspec.Struct, kw_only=True):
    total: int = 0
    completed: int = 0
    failed: int = 0


class BatchInputDetails(msgspec.Struct, kw_only=True):
    cached_tokens: int = 0


class BatchOutputDetails(msgspec.Struct, kw_only=True):
    reasoning_tokens: int = 0


class BatchUsage(msgspec.Struct, kw_only=True):
    input_tokens: int = 0
    input_tokens_details: BatchInputDetails = msgspec.field(default_factory=BatchInputDetails)
    output_tokens: int = 0
    output_tokens_details: BatchOutputDetails = msgspec.field(default_factory=BatchOutputDetails)
    total_tokens: int = 0


class BatchView(msgspec.Struct, kw_only=True):
    id: str
    object: Literal["batch"] = "batch"
    endpoint: str
    completion_window: str
    input_file_id: str
    output_file_id: str | None = None
    error_file_id: str | None = None
    status: BatchStatus = "validating"
    errors: LineErrors | None = None
    created_at: int
    in_progress_at: int | None = None
    expires_at: int
    finalizing_at: int | None = None
    completed_at: int | None = None
    failed_at: int | None = None
    expired_at: int | None = None
    cancelling_at: int | None = None
    cancelled_at: int | None = None
    request_counts: BatchCounts = msgspec.field(default_factory=BatchCounts)
    usage: BatchUsage = msgspec.field(default_factory=BatchUsage)
    metadata: dict[str, str] | None = None

    @classmethod
    def of(cls, batch: Batch) -> "BatchView":
        """A view with the counts as they are now."""
        view = msgspec.json.decode(batch.view, type=cls)
        view.request_counts.completed, view.request_counts.failed = batch.completed, batch.failed
        view.usage = BatchUsage(
            input_tokens=batch.input_tokens,
            input_tokens_details=BatchInputDetails(cached_tokens=batch.cached_tokens),
            output_tokens=batch.output_tokens,
            total_tokens=batch.input_tokens + batch.output_tokens,
        )
        return view

    def enter(self, status: BatchStatus, now_s: int) -> None:
        """It has this status from now on."""
        self.status = status
        setattr(self, f"{status}_at", now_s)


class BatchList(msgspec.Struct, kw_only=True):
    object: Literal["list"] = "list"
    data: list[BatchView]
    first_id: str | None
    last_id: str | None
    has_more: bool


class DeletedFile(msgspec.Struct, kw_only=True):
    id: str
    object: Literal["file"] = "file"
    deleted: bool = True
