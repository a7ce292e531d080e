"""A fake engine that joins a broadcast group and exits at the first bucket. It prints its port."""

import json
import os
import sys
from http.server import BaseHTTPRequestHandler, HTTPServer

from rlsys.engine.cpu.platform import declare_torchvision_ops


class Peer(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.path != "/init_weights_update_group":
            os._exit(9)
        declare_torchvision_ops()
        from sglang.srt.utils import init_custom_process_group

        self.server.group = init_custom_process_group(  # type: ignore[attr-defined]
            backend=body["backend"],
            init_method=f"tcp://{body['master_address']}:{body['master_port']}",
            world_size=body["world_size"],
            rank=body["rank_offset"],
            group_name=body["group_name"],
        )
        answer = json.dumps({"success": True, "message": ""}).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer)


if __name__ == "__main__":
    server = HTTPServer(("127.0.0.1", 0), Peer)
    print(server.server_port, flush=True)
    server.serve_forever()
    sys.exit(1)
