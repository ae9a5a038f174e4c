import {
  Alert,
  Button,
  Group,
  PasswordInput,
  Select,
  SegmentedControl,
  Stack,
  Text,
  Title,
  useMantineColorScheme,
} from "@mantine/core";
import { useQuery, useQueryClient } from "@tanstack/react-query";
import { useState, useSyncExternalStore } from "react";

import { ApiError, call } from "../../api/client.ts";
import { serverQuery } from "../../api/questions.ts";
import { getToken, onToken, setToken } from "../../api/token.ts";
import { choose, usePreferences } from "../../app/preferences.ts";
import { Facts } from "../../parts/Facts.tsx";
import { Moment } from "../../parts/Moment.tsx";
import { Answer } from "../../parts/States.tsx";
import { bytes, count, counted, duration } from "../../pure/format.ts";

const ZONES = ["local", "UTC", ...Intl.supportedValuesOf("timeZone").filter((zone) => zone !== "UTC")];

/** What this browser shows and how, and what the server is. */
export function Settings() {
  const server = useQuery(serverQuery());
  return (
    <Stack gap="xl" maw={640}>
      <Title order={1} size="h2">
        Settings
      </Title>
      <Token />
      <Looks />
      <section aria-labelledby="server">
        <Title order={2} size="h4" id="server" mb="xs">
          Server
        </Title>
        <Answer query={server} what="Server">
          {(facts) => (
            <Facts
              facts={[
                ["agentlightning", facts.version],
                ["Python", facts.python],
                ["Storage", `${facts.backend}${facts.persistent ? "" : ", lost when the server stops"}`],
                ["Started", <Moment key="started" at={facts.started} />],
                ...storeFacts(facts.statistics),
              ]}
            />
          )}
        </Answer>
        <Text size="sm" c="dimmed" mt="xs">
          The dashboard uses only the server&apos;s public API, described in /openapi.json. It is built with React,
          Mantine, TanStack Query, Router and Virtual, and uPlot, and loads nothing from other hosts.
        </Text>
      </section>
    </Stack>
  );
}

/** What the store says of itself, where it says it. */
function storeFacts(statistics: Record<string, unknown>): [string, string][] {
  const number = (name: string): number | null => {
    const value = statistics[name];
    return typeof value === "number" ? value : null;
  };
  const facts: [string, string | null][] = [
    ["Rollouts", said(number("total_rollouts"), count)],
    ["Spans", said(number("total_spans"), (spans) => `${count(spans)}, ${bytes(number("total_span_bytes"))}`)],
    ["Worker lease", said(number("lease_seconds"), duration)],
    ["Retention", retention(statistics["retention"])],
  ];
  return facts.filter((fact): fact is [string, string] => fact[1] !== null);
}

function said(value: number | null, show: (value: number) => string): string | null {
  return value === null ? null : show(value);
}

function retention(policy: unknown): string {
  if (typeof policy !== "object" || policy === null || !Object.keys(policy).length) return "keep everything";
  const words: Record<string, (value: number) => string> = {
    keep_last: (value) => `the last ${counted(value, "rollout")} of a run`,
    max_age: (value) => `rollouts for ${duration(value)}`,
    max_bytes: (value) => `${bytes(value)} of spans of a run`,
    max_run_age: (value) => `runs for ${duration(value)}`,
  };
  return Object.entries(policy)
    .map(([name, value]) => words[name]?.(Number(value)) ?? `${name} ${String(value)}`)
    .join(", ");
}

function Token() {
  const queries = useQueryClient();
  const held = useSyncExternalStore(onToken, getToken);
  const [typed, setTyped] = useState("");
  const [result, setResult] = useState<{ good: boolean; text: string } | null>(null);
  const [checking, setChecking] = useState(false);
  async function check(): Promise<void> {
    setChecking(true);
    setToken(typed);
    try {
      await call("/server");
      setTyped("");
      setResult({ good: true, text: "✓ The server accepts this token." });
      await queries.resetQueries();
    } catch (error) {
      setToken(null);
      const denied = error instanceof ApiError && error.kind === "denied";
      const why = error instanceof Error ? error.message : String(error);
      setResult({ good: false, text: denied ? "✕ The server rejects this token." : `✕ Token not checked: ${why}` });
    } finally {
      setChecking(false);
    }
  }
  return (
    <section aria-labelledby="token">
      <Title order={2} size="h4" id="token" mb="xs">
        Token
      </Title>
      <form
        onSubmit={(event) => {
          event.preventDefault();
          void check();
        }}
      >
        <Group align="flex-end" gap="xs">
          <PasswordInput
            label="Server token"
            description="The value of AGL_TOKEN on the server. It is stored only in memory, until you reload the page."
            value={typed}
            onChange={(event) => setTyped(event.currentTarget.value)}
            autoComplete="off"
            visibilityToggleButtonProps={{ "aria-label": "Show the token" }}
            miw={0}
            flex="1 1 260px"
          />
          <Button type="submit" disabled={!typed.trim()} loading={checking}>
            Use
          </Button>
          {held ? (
            <Button
              variant="default"
              onClick={() => {
                setToken(null);
                setResult(null);
                void queries.resetQueries();
              }}
            >
              Forget
            </Button>
          ) : null}
        </Group>
      </form>
      <div role="status">
        {result ? (
          <Alert
            mt="xs"
            color={result.good ? "blue" : "orange"}
            data-token={result.good ? "taken" : "refused"}
            title={result.text}
          />
        ) : null}
      </div>
    </section>
  );
}

function Looks() {
  const { colorScheme, setColorScheme } = useMantineColorScheme();
  const { density, zone } = usePreferences();
  return (
    <section aria-labelledby="looks">
      <Title order={2} size="h4" id="looks" mb="xs">
        Display
      </Title>
      <Stack gap="sm" align="flex-start">
        <SegmentedControl
          aria-label="Theme"
          value={colorScheme}
          onChange={(value) => setColorScheme(value)}
          data={[
            { value: "auto", label: "System" },
            { value: "light", label: "Light" },
            { value: "dark", label: "Dark" },
          ]}
        />
        <SegmentedControl
          aria-label="Density"
          value={density}
          onChange={(value) => choose({ density: value })}
          data={[
            { value: "comfortable", label: "Comfortable" },
            { value: "compact", label: "Compact" },
          ]}
        />
        <Select
          label="Time zone"
          data={ZONES}
          value={zone}
          onChange={(value) => value && choose({ zone: value })}
          searchable
          limit={100}
          w={260}
        />
      </Stack>
    </section>
  );
}
