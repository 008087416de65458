"""What every request is checked against: keys of tenants, gateways and host names."""

from __future__ import annotations

from dataclasses import dataclass

from starlette.types import ASGIApp

from headway.clock import Clock
from headway.config import ServerConfig
from headway.server.http.auth import Authentication
from headway.server.http.hosts import HostCheck, HostPolicy
from headway.server.http.proxies import TrustedProxies
from headway.server.prompt_log import PromptLog, open_prompt_log
from headway.tenancy.load import LoadedTenants, load_tenants


@dataclass(frozen=True, slots=True)
class AccessControl:
    """The checks before every route except GET of the probes, read once from the settings."""

    config: ServerConfig
    tenants: LoadedTenants
    proxies: TrustedProxies
    hosts: HostPolicy
    admin_hosts: HostPolicy
    prompt_log: PromptLog | None = None

    @classmethod
    def of(cls, config: ServerConfig, clock: Clock) -> AccessControl:
        """Read the files that the settings name; raise ConfigError if a file is wrong."""
        return cls(
            config,
            load_tenants(config, clock),
            TrustedProxies.of(config.trusted_proxy),
            HostPolicy.of(config.host, config.allowed_host),
            HostPolicy.of(config.admin_host, config.allowed_host),
            open_prompt_log(config.log_prompts),
        )

    def protect(self, app: ASGIApp, hosts: HostPolicy) -> ASGIApp:
        """Return the app behind the checks of the Host header and of the key."""
        return HostCheck(Authentication(app, self.tenants.directory, self.proxies), hosts)
