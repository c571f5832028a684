"""Snapshots of workspaces: content-addressed, deduplicated, incremental, in the object store.

workspaces = Workspaces(blobs)
ref = await workspaces.snapshot(sandbox, since)            # BlobRef; `since` itself when nothing has changed
manifest = await workspaces.restore(sandbox, ref, disk_bytes=limits.disk_bytes)
manifest = await workspaces.open(ref)                      # .files, .tree_sha256, .interpreter, .size
ref = await stored(Path("data"), blobs)                    # a folder of this machine as a session's first workspace
"""

from turnlog.sandbox_workers.workspaces.folder import stored as stored
from turnlog.sandbox_workers.workspaces.store import Workspaces as Workspaces
