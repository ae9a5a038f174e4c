/** The frame of every view: navigation, whether the page is live, and the place for the view itself. */

import { Alert, Anchor, AppShell, Burger, Group, NavLink, Text } from "@mantine/core";
import { useDisclosure } from "@mantine/hooks";
import { useQuery } from "@tanstack/react-query";
import { Link, Outlet, useLocation } from "@tanstack/react-router";
import { useEffect } from "react";

import { serverQuery } from "../api/questions.ts";
import { ConnectionSign, LagSign } from "./ConnectionSign.tsx";
import { useLiveStore } from "./live.ts";
import { loadAhead } from "./views.ts";

const places = [
  { to: "/runs", label: "Runs" },
  { to: "/rollouts", label: "Rollouts" },
  { to: "/compare", label: "Compare" },
  { to: "/resources", label: "Resources" },
  { to: "/workers", label: "Workers" },
  { to: "/settings", label: "Settings" },
] as const;

export function Shell() {
  const [open, { toggle, close }] = useDisclosure(false);
  const { pathname } = useLocation();
  const { connection, behind } = useLiveStore();
  useQuery(serverQuery()); // every view counts by the server's clock
  const here = pathname === "/" ? "/runs" : pathname;
  useEffect(close, [pathname, close]);
  useEffect(() => {
    if (connection === "live") loadAhead();
  }, [connection]);
  return (
    <AppShell
      header={{ height: 48 }}
      navbar={{ width: 168, breakpoint: "sm", collapsed: { mobile: !open } }}
      padding="md"
    >
      <AppShell.Header>
        <a className="agl-skip" href="#main" onClick={skipToMain}>
          Skip to the content
        </a>
        <Group h="100%" px="md" gap="sm" wrap="nowrap">
          <Burger
            opened={open}
            onClick={toggle}
            hiddenFrom="sm"
            size="sm"
            aria-label="Navigation"
            aria-expanded={open}
          />
          <Anchor component={Link} to="/runs" underline="never" c="inherit">
            <Text fw={700}>agentlightning</Text>
          </Anchor>
          <Group ml="auto" gap="sm" wrap="nowrap">
            <LagSign behind={behind} />
            <ConnectionSign state={connection} />
          </Group>
        </Group>
      </AppShell.Header>
      <AppShell.Navbar p="xs" component="nav" aria-label="Views">
        {places.map(({ to, label }) => (
          <NavLink
            key={to}
            component={Link}
            to={to}
            label={label}
            active={here.startsWith(to)}
            aria-current={here === to ? "page" : undefined}
          />
        ))}
      </AppShell.Navbar>
      <AppShell.Main id="main" tabIndex={-1}>
        <div role="status">
          {connection === "lost" ? (
            <Alert color="orange" mb="md" p="xs" title="✕ Offline: no response from the server" data-state="offline">
              Data loaded before is still shown. The dashboard retries automatically.
            </Alert>
          ) : null}
        </div>
        <Outlet />
      </AppShell.Main>
    </AppShell>
  );
}

/** The address behind `#` is the route, so the jump is made by hand. */
function skipToMain(event: { preventDefault: () => void }): void {
  event.preventDefault();
  document.getElementById("main")?.focus();
}
