"""/v1/files: what is uploaded is what is downloaded, by its tenant only, within bounds."""

from __future__ import annotations

import re
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest

from headway.errors import ConfigError
from headway.server.batches import store as store_module
from headway.server.batches.folder import BatchFolder
from tests.support.apps import check_error
from tests.support.postgres import BOTH_DATABASES

CONTENT = b'{"custom_id": "a"}\n' * 50


async def upload(client: httpx.AsyncClient, content: bytes = CONTENT, **fields: str) -> Any:
    files = {"file": ("in.jsonl", content, "application/jsonl")}
    return await client.post("/v1/files", files=files, data={"purpose": "batch", **fields})


@BOTH_DATABASES
async def test_a_file_is_stored_listed_read_and_deleted(batch_app, wall) -> None:
    made = await batch_app()
    client = made.client()
    answer = await upload(client)
    assert answer.status_code == 200, answer.text
    found = answer.json()
    assert re.fullmatch("file-[0-9a-f]{32}", found["id"])
    assert found == {
        "id": found["id"],
        "object": "file",
        "bytes": len(CONTENT),
        "created_at": int(wall.now),
        "expires_at": int(wall.now) + 30 * 86_400,
        "filename": "in.jsonl",
        "purpose": "batch",
        "status": "processed",
        "status_details": None,
    }
    path = f"/v1/files/{found['id']}"
    assert (await client.get(path)).json() == found
    content = await client.get(path + "/content")
    assert content.content == CONTENT
    assert content.headers["content-length"] == str(len(CONTENT))
    assert (await client.get("/v1/files")).json()["data"] == [found]
    assert (await client.delete(path)).json() == {
        "id": found["id"],
        "object": "file",
        "deleted": True,
    }
    for gone in (client.get(path), client.get(path + "/content"), client.delete(path)):
        check_error(await gone, 404)
    assert list((made.store.folder.path / "files").iterdir()) == []
    assert list((made.store.folder.path / "uploads").iterdir()) == []


async def test_a_list_has_pages(batch_app, wall) -> None:
    client = (await batch_app()).client()
    ids = [(await upload(client)).json()["id"] for _ in range(5)]
    newest_first = (await client.get("/v1/files")).json()
    assert [one["id"] for one in newest_first["data"]] == ids[::-1]
    page = (await client.get("/v1/files", params={"order": "asc", "limit": 2})).json()
    assert [one["id"] for one in page["data"]] == ids[:2]
    assert page["has_more"] and page["last_id"] == ids[1]
    params = {"order": "asc", "limit": 9, "after": page["last_id"]}
    rest = (await client.get("/v1/files", params=params)).json()
    assert [one["id"] for one in rest["data"]] == ids[2:] and not rest["has_more"]
    assert (await client.get("/v1/files?purpose=batch_output")).json()["data"] == []
    for wrong in ("limit=0", "limit=x", "order=up", "after=file-1", "purpose=vision", "page=2"):
        check_error(await client.get(f"/v1/files?{wrong}"), 400)
    check_error(await client.get("/v1/files?limit=1&limit=2"), 400)


async def test_a_tenant_sees_its_own_files_only(batch_app) -> None:
    made = await batch_app(api_key=("one", "two"))
    one, two = made.client("one"), made.client("two")
    file_id = (await upload(one)).json()["id"]
    for request in (
        two.get(f"/v1/files/{file_id}"),
        two.get(f"/v1/files/{file_id}/content"),
        two.delete(f"/v1/files/{file_id}"),
    ):
        check_error(await request, 404)
    assert (await two.get("/v1/files")).json()["data"] == []
    assert (await one.get(f"/v1/files/{file_id}")).status_code == 200
    check_error(await made.client().get("/v1/files"), 401)


@BOTH_DATABASES
async def test_a_file_ends_with_its_time(batch_app, wall) -> None:
    made = await batch_app()
    client = made.client()
    extra = {"expires_after[anchor]": "created_at", "expires_after[seconds]": "3600"}
    file_id = (await upload(client, CONTENT, **extra)).json()["id"]
    other_id = (await upload(client)).json()["id"]
    wall.now += 3601
    check_error(await client.get(f"/v1/files/{file_id}"), 404)
    await made.store.remove_expired()
    assert [one.name for one in (made.store.folder.path / "files").iterdir()] == [other_id]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"purpose": "vision"}, "purpose"),
        ({"purpose": "x" * 300}, "purpose"),
        ({"other": "1"}, "other"),
        ({"expires_after[seconds]": "3600"}, "expires_after"),
        ({"expires_after[anchor]": "created_at"}, "expires_after"),
        (
            {"expires_after[anchor]": "created_at", "expires_after[seconds]": "99999999999"},
            "expires_after",
        ),
    ],
)
async def test_a_wrong_field_is_refused_by_name(
    batch_app, fields: dict[str, Any], param: str
) -> None:
    made = await batch_app()
    error = check_error(await upload(made.client(), **fields), 400)
    assert error["param"] == param
    assert list((made.store.folder.path / "uploads").iterdir()) == []
    assert list((made.store.folder.path / "files").iterdir()) == []


async def test_a_form_without_its_file_is_refused(batch_app) -> None:
    client = (await batch_app()).client()
    no_file = {"purpose": (None, b"batch")}
    assert check_error(await client.post("/v1/files", files=no_file), 400)["param"] == "file"
    nameless = {"purpose": (None, b"batch"), "file": (None, b"{}")}
    assert check_error(await client.post("/v1/files", files=nameless), 400)["param"] == "file"
    two = [("file", ("a", b"1")), ("file", ("b", b"2"))]
    assert check_error(await client.post("/v1/files", files=two), 400)["param"] == "file"
    check_error(await client.post("/v1/files", json={"purpose": "batch"}), 415)


async def test_files_are_bounded(batch_app, monkeypatch) -> None:
    limits = {"batch_file_bytes": 2000, "batch_tenant_bytes": 3000, "batch_total_bytes": 4000}
    made = await batch_app(batches=limits, api_key=("one", "two", "three"))
    one, two, three = (made.client(key) for key in ("one", "two", "three"))
    error = check_error(await upload(one, b"x" * 2001), 413)
    assert "batch_file_bytes" in error["message"]
    error = check_error(await upload(one, b"x" * 100_000), 413)
    assert "batch_file_bytes" in error["message"]
    kept = (await upload(one, b"x" * 2000)).json()["id"]
    assert "batch_tenant_bytes" in check_error(await upload(one, b"x" * 1001), 400)["message"]
    assert (await upload(two, b"x" * 1900)).status_code == 200
    assert "batch_total_bytes" in check_error(await upload(three, b"x" * 200), 400)["message"]
    await one.delete(f"/v1/files/{kept}")
    assert (await upload(three, b"x" * 200)).status_code == 200
    monkeypatch.setattr(store_module, "MAX_FILES", 1)
    check_error(await upload(three, b"x"), 400)
    assert (await upload(one, b"x")).status_code == 200


async def test_transfers_are_bounded_for_each_tenant(batch_app) -> None:
    made = await batch_app(api_key=("one", "two"))
    one, two = made.client("one"), made.client("two")
    file_id = (await upload(one)).json()["id"]
    tenant = next(iter(made.store._files.values())).tenant
    with ExitStack() as stack:
        for _ in range(store_module.MAX_TENANT_TRANSFERS):
            stack.enter_context(made.store.transfer(tenant))
        check_error(await upload(one), 429)
        check_error(await one.get(f"/v1/files/{file_id}/content"), 429)
        assert (await upload(two)).status_code == 200
    assert (await one.get(f"/v1/files/{file_id}/content")).status_code == 200
    assert not made.store._transfers


async def test_without_a_folder_the_answer_says_what_to_set(local) -> None:
    made = await local()
    for path in ("/v1/files", "/v1/files/x", "/v1/batches"):
        assert "--batch-dir" in check_error(await made.client.get(path), 404)["message"]


@BOTH_DATABASES
async def test_files_outlive_the_server_and_leftovers_do_not(open_store) -> None:
    store = open_store()
    folder = store.folder.path
    try:
        async with store.upload("t") as file:
            await file.write(CONTENT)
            record = await file.finish("in.jsonl", 3600)
        with pytest.raises(ConfigError, match="another server uses"):
            BatchFolder(folder)
        (folder / "uploads" / "torn").write_bytes(b"x")
        (folder / "files" / "unknown").write_bytes(b"x")
    finally:
        store.close()
    again = open_store()
    try:
        assert again.num_starts == store.num_starts + 1
        assert again.files_of("t") == [record]
        assert again.folder.path_of(record.id).read_bytes() == CONTENT
        assert [one.name for one in (folder / "files").iterdir()] == [record.id]
        assert list((folder / "uploads").iterdir()) == []
    finally:
        again.close()


async def test_a_full_disk_is_503(batch_app, monkeypatch) -> None:
    made = await batch_app()

    def fail(*_: object) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(store_module.os, "write", fail)
    check_error(await upload(made.client(), b"x" * 300_000), 503)
    monkeypatch.undo()
    assert (await upload(made.client())).status_code == 200


def test_a_folder_that_cannot_be_made_is_a_config_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="batch_dir"):
        BatchFolder(tmp_path / "file")
