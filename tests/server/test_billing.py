"""The server as it is built: what a tenant used is in the ledger, at the prices of its tier."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import httpx
from typer.testing import CliRunner

from benchmarks.support.servers import free_port, start_process
from headway.cli.app import make_app
from headway.tenancy.keys import digest_of, write_digest
from tests.server.test_ledger import ledger_url, wait_rows

SERVE = """
import json, logging, sys
from headway.build_server import run_server
from headway.config import load_config

logging.basicConfig(level=logging.INFO)
command = (sys.executable, "-m", "benchmarks.support.fake_engine")
sys.exit(run_server(load_config(json.loads(sys.argv[1])), command))
"""
TENANTS = """
tiers:
  gold: {{price: {{prompt: 2.0, cached_prompt: 0.5, output: 10.0}}}}
tenants:
  a: {{tier: gold, keys: ["{key}"]}}
  boss: {{keys: ["{boss}"], admin: true}}
"""


def digest(secret: str) -> str:
    return write_digest(digest_of(secret.encode()))


def test_a_request_is_billed_by_the_price_of_its_tier(tokenizer_path: Path, tmp_path: Path) -> None:
    port, admin_port = free_port(), free_port()
    tenants = tmp_path / "tenants.yaml"
    tenants.write_text(TENANTS.format(key=digest("key-of-a"), boss=digest("key-of-boss")))
    settings = {
        "model": str(tokenizer_path),
        "port": port,
        "admin_port": admin_port,
        "tenants_file": str(tenants),
        "ledger_url": ledger_url(tmp_path),
    }
    command = [sys.executable, "-c", SERVE, json.dumps(settings)]
    server = start_process(command, port, tmp_path / "server.log", admin_port)
    try:
        server.wait_ready("key-of-a")
        with httpx.Client(base_url=server.url) as client:
            headers = {"Authorization": "Bearer key-of-a"}
            body = {"prompt": "prompt", "max_tokens": 7}
            answer = client.post("/v1/completions", json=body, headers=headers).json()
            usage = answer["usage"]
            path = f"/v1/requests/{answer['id']}/explanation"
            boss = client.get(path, headers={"Authorization": "Bearer key-of-boss"}).json()
            assert (boss["tenant"], boss["tier"]) == ("a", "gold")
        (row,) = wait_rows(tmp_path, 1).values()
        expected = 2 * usage["prompt_tokens"] + 10 * usage["completion_tokens"]
        assert (usage["completion_tokens"], row["cost_e12"]) == (7, expected * 10**6)
    finally:
        assert server.stop() == 0, server.log
    result = CliRunner().invoke(
        make_app(), ["usage", "--by", "tenant,tier", "--csv", "--ledger-url", ledger_url(tmp_path)]
    )
    assert result.stdout.splitlines()[1].startswith("a,gold,1,")
    assert result.stdout.splitlines()[1].endswith(f",{expected / 10**6:.6f}".rstrip("0"))
    assert not os.listdir(tmp_path / "ledger.db.spool")
