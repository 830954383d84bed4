"""A hub of models on this machine, for huggingface_hub's own requests."""

import json
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from huggingface_hub import constants

COMMIT = "0" * 40


@contextmanager
def served_hub(files: dict[str, bytes | None]):
    """Yields the paths that were asked for. Each repository has `files` in COMMIT; None cannot be downloaded."""
    asked = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            path = self.path.partition("?")[0]
            if "/resolve/" in path or path.startswith("/api/models/"):  # others are of the library itself
                asked.append(path)
            info = {"id": "any/model", "sha": COMMIT, "siblings": [{"rfilename": name} for name in files]}
            name = path.partition("/resolve/")[2].partition("/")[2]
            content = json.dumps(info).encode() if path.startswith("/api/models/") else files.get(name)
            self.send_response(404 if content is None else 200)
            missing = {"X-Error-Code": "EntryNotFound", "Content-Length": "0"}
            there = {"X-Repo-Commit": COMMIT, "ETag": f'"{len(name)}"', "Content-Length": str(len(content or b""))}
            for header in (missing if content is None else there).items():
                self.send_header(*header)
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(content or b"")

        do_HEAD = do_GET

        def log_message(self, *_):
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server, pytest.MonkeyPatch.context() as patch:
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        address, template = f"http://127.0.0.1:{server.server_port}", constants.HUGGINGFACE_CO_URL_TEMPLATE
        patch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template.replace(constants.ENDPOINT, address))
        patch.setattr(constants, "ENDPOINT", address)
        patch.setattr(constants, "HF_HUB_OFFLINE", False)
        yield asked
        server.shutdown()
