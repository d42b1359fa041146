from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from samestep.masking import is_secret, mask, mask_text, mask_urls, mask_words


@pytest.mark.parametrize(
    "name",
    [
        "password", "--db-password", "passwd", "secret", "client_secret", "clientSecret", "token",
        "hf_token", "HF_TOKEN", "accessToken", "api_key", "apikey", "APIKEY", "OPENAI_API_KEY",
        "access_key", "secret-key", "private_key", "credentials", "Authorization", "secret_name",
        "pwd", "userPwd", "PGPASSWORD", "dbpassword", "authtoken", "cookie", "session-cookie",
        "proxy_authorization", "passphrase", "api-key", "signing_key",
    ],
)  # fmt: skip
def test_names_of_secrets(name):
    assert is_secret(name)
    assert mask({name: "hidden"}) == {name: "***"}
    assert mask({"outer": [{name: ["hidden", {"user": "hidden"}]}]}) == {
        "outer": [{name: ["***", {"user": "***"}]}]
    }


@pytest.mark.parametrize(
    "name",
    [
        "tokens_per_batch", "max_tokens", "tokenizer", "pad_token", "eos-token", "token_type",
        "key", "keys", "num_key_value_heads", "monkey", "secretary", "password_file",
        "SAMESTEP_TOKEN_FILE", "passes", "author", "dir", "", "padtoken", "primary_key", "key_size",
        "cookie_path", "broken", "p", "--pwd-file",
    ],
)  # fmt: skip
def test_other_names(name):
    assert not is_secret(name)
    assert mask({name: "shown"}) == {name: "shown"}


def test_numbers_and_booleans_are_no_secrets():
    settings = {"token": 5, "secret": True, "password": None, "api_key": 0.5}
    assert mask(settings) == settings


@pytest.mark.parametrize(
    ("url", "masked"),
    [
        ("s3://user:pass@host/run", "s3://***@host/run"),
        ("https://TOKEN@host/run", "https://***@host/run"),
        ("https://u:p@ss@host:80/a?b=c", "https://***@host:80/a?b=c"),
        (
            "https://h/a?X-Amz-Credential=a%2Fb&X-Amz-Date=1&X-Amz-Signature=ff#end",
            "https://h/a?X-Amz-Credential=***&X-Amz-Date=1&X-Amz-Signature=***#end",
        ),
        ("abfs://c/run?sv=1&sig=a%3D&se=2", "abfs://c/run?sv=1&sig=***&se=2"),
        (
            "failed for url='https://h/?token=x', sorry",
            "failed for url='https://h/?token=***', sorry",
        ),
        (
            "simplecache::https://a:b@h/x and ftp://c:d@h",
            "simplecache::https://***@h/x and ftp://***@h",
        ),
        ("file:///my runs/a?sig=x&n=1", "file:///my runs/a?sig=***&n=1"),
        ("s3://u:a b@host/my run", "s3://***@host/my run"),
        ("https://h:8080, from a@b.c", "https://h:8080, from a@b.c"),
        ("--sinks=s3://b/x,https://u:p@h/y", "--sinks=s3://b/x,https://***@h/y"),
        ("s3://bucket/run?version=3&page=token", "s3://bucket/run?version=3&page=token"),
        ("mail a@b.c, path/token=x", "mail a@b.c, path/token=x"),
    ],
)
def test_urls(url, masked):
    assert mask_urls(url) == masked
    assert mask({"remote": url}) == {"remote": masked}
    assert mask_urls(masked) == masked


@pytest.mark.parametrize(
    ("text", "masked"),
    [
        ('{"password": "x, y", "n": 1}', '{"password": "***", "n": 1}'),
        ('c={"a": {"api-key": "x\\"y"}}', 'c={"a": {"api-key": "***"}}'),
        ('{\\"token\\": \\"x\\"}', '{\\"token\\": \\"***\\"}'),
        ('{"credentials": {"a": "x", "b": ["y"]}}', '{"credentials": ***'),
        ("db={password: x, user: y}", "db={password: ***, user: y}"),
        ("db={user:y,pwd:x}", "db={user:y,pwd:***}"),
        ("{'cookie': 'x'}", "{'cookie': '***'}"),
        ("Server=h,1;Password=a b;Database=d", "Server=h,1;Password=***;Database=d"),
        ("dsn=Server=h;Pwd=x", "dsn=Server=h;Pwd=***"),
        ("host=h password='a b' dbname=d", "host=h password='***' dbname=d"),
        ("url=postgres://u:p@h/db?password=x", "url=postgres://***@h/db?password=***"),
        ("jdbc:db://h;user=a;password=b;n=1", "jdbc:db://h;user=a;password=***;n=1"),
        ("env PGPASSWORD=x job --token y --lr 1", "env PGPASSWORD=*** job --token *** --lr 1"),
        ('["--token", "x y", "--lr", "1"]', '["--token", "***", "--lr", "1"]'),
        ("words=['-p','x','--token','--lr']", "words=['-p','***','--token','--lr']"),
        ("mysql -p x -P 3306", "mysql -p *** -P 3306"),
        ('curl -H "Cookie: a=b; c=d" h', 'curl -H "Cookie: ***" h'),
        ("a token is here: b, max_tokens=5", "a token is here: b, max_tokens=5"),
        ("job -p 8080 path/token=x", "job -p 8080 path/token=x"),
    ],
)
def test_secrets_within_a_text(text, masked):
    assert mask_text(text) == masked
    assert mask({"words": ["job", text]}) == {"words": ["job", masked]}


def test_commands():
    words = [
        "train.py", "--password=a b", "--api-key", "x", "token=y", "--token", "--lr", "0.1",
        "--max-tokens", "5", "--header", "Authorization: Bearer z", "--password", "last",
        "--data=https://u:p@h/", "--token-file", "/run/token", "-p", "x", "-p", "8080",
        "db={password: x}",
    ]  # fmt: skip
    assert mask_words(words) == [
        "train.py", "--password=***", "--api-key", "***", "token=***", "--token", "--lr", "0.1",
        "--max-tokens", "5", "--header", "Authorization: ***", "--password", "***",
        "--data=https://***@h/", "--token-file", "/run/token", "-p", "***", "-p", "8080",
        "db={password: ***}",
    ]  # fmt: skip
    assert mask({"command": words}) == {"command": mask_words(words)}


@given(st.text())
def test_any_text_is_masked_once(text):
    assert mask_urls(mask_urls(text)) == mask_urls(text)
    assert isinstance(mask_text(text), str)
    assert len(mask_words([text])) == 1
