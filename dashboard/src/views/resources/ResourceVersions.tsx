import { Anchor, Button, Group, NumberInput, ScrollArea, Stack, Table, Text, Title } from "@mantine/core";
import { keepPreviousData, queryOptions, useQuery } from "@tanstack/react-query";
import { useParams, useSearch } from "@tanstack/react-router";
import { useMemo, useState } from "react";

import { call, part } from "../../api/client.ts";
import { aggregateQuery, resourceQuery } from "../../api/questions.ts";
import type { Page, ResourcesUpdate } from "../../api/types.ts";
import { Facts } from "../../parts/Facts.tsx";
import { Moment } from "../../parts/Moment.tsx";
import { Answer } from "../../parts/States.tsx";
import { Tree } from "../../parts/Tree.tsx";
import { href } from "../../pure/address.ts";
import { bytes, counted, decimal } from "../../pure/format.ts";
import { interval, limits } from "../../pure/steps.ts";
import { named, visible } from "../../pure/visible.ts";
import { foldedPieces, wordDiff } from "../../pure/words.ts";

/** So many versions are shown at once. */
const MOST = 50;

/** One version of a set of resources beside an earlier one: what changed, word by word, and what each earned. */
export function ResourceVersions() {
  const { resourcesId } = useParams({ strict: false }) as { resourcesId: string };
  const latest = useQuery(resourceQuery(resourcesId));
  return (
    <Stack gap="md" maw={960}>
      <Title order={1} size="h2" className="agl-text">
        {named(resourcesId)}
      </Title>
      <Answer query={latest} what={`Resources ${resourcesId}`}>
        {({ version }) => <Versions resourcesId={resourcesId} last={version} />}
      </Answer>
    </Stack>
  );
}

function Versions({ resourcesId, last }: { resourcesId: string; last: number }) {
  const search = useSearch({ strict: false }) as { version?: string; before?: string };
  const version = Number(search.version) || last;
  const before = Number(search.before) || Math.max(1, version - 1);
  const now = useQuery(resourceQuery(resourcesId, version));
  const then = useQuery(resourceQuery(resourcesId, before));
  const rewards = useQuery(aggregateQuery("resources", { resources_id: resourcesId }));
  const show = (change: object): void => {
    window.location.hash = href(["resources", resourcesId], { version, before, ...change });
  };
  const earned = (number: number) => {
    const group = rewards.data?.groups.find(({ key }) => key === `${resourcesId}@${number}`);
    const range = limits(interval(group));
    return (
      <>
        {decimal(group?.mean)}
        {range ? ` (${range})` : ""}, {counted(group?.count ?? 0, "rollout")}{" "}
        <Anchor size="sm" underline="always" href={href(["rollouts"], { resources: resourcesId, version: number })}>
          view rollouts of version {number}
        </Anchor>
      </>
    );
  };
  return (
    <>
      <Group gap="sm">
        <NumberInput
          label="Version"
          min={1}
          max={last}
          value={version}
          onChange={(value) => show({ version: value })}
          w={120}
        />
        <NumberInput
          label="Compare with"
          min={1}
          max={last}
          value={before}
          onChange={(value) => show({ before: value })}
          w={120}
        />
      </Group>
      <Answer query={now} what={`Version ${version}`}>
        {(update) => (
          <>
            <Facts
              facts={[
                ["Stored", <Moment key="stored" at={update.update_time} />],
                [`Mean reward, version ${version}`, earned(version)],
                ...(before === version
                  ? []
                  : ([[`Mean reward, version ${before}`, earned(before)]] as [string, React.ReactNode][])),
              ]}
            />
            {Object.entries(update.resources).map(([name, value]) => (
              <section key={name} aria-label={named(name)}>
                <Title order={2} size="h4" className="agl-text">
                  {named(name)}
                </Title>
                {isPrompt(value) || differs(then.data?.resources[name], value) ? (
                  <Difference
                    before={textOf(then.data?.resources[name])}
                    after={textOf(value)}
                    compared={before !== version && Boolean(then.data)}
                  />
                ) : (
                  <>
                    {before !== version && then.data ? (
                      <Text size="sm" c="dimmed">
                        Unchanged.
                      </Text>
                    ) : null}
                    <Tree value={withoutKeys(value)} />
                  </>
                )}
              </section>
            ))}
          </>
        )}
      </Answer>
      <VersionTable resourcesId={resourcesId} shown={version} earned={earned} />
    </>
  );

  function differs(old: unknown, value: unknown): boolean {
    return before !== version && then.data !== undefined && textOf(old) !== textOf(value);
  }
}

const versionsQuery = (resourcesId: string, offset: number) =>
  queryOptions({
    queryKey: ["resources", "versions", resourcesId, offset],
    queryFn: ({ signal }) =>
      call<Page<ResourcesUpdate>>(`/resources/${part(resourcesId)}/versions`, {
        query: { limit: MOST, offset },
        signal,
      }),
    placeholderData: keepPreviousData,
  });

/** Every version that is kept, the newest first, each with what its rollouts earned. */
function VersionTable({
  resourcesId,
  shown,
  earned,
}: {
  resourcesId: string;
  shown: number;
  earned: (version: number) => React.ReactNode;
}) {
  const [offset, setOffset] = useState(0);
  const versions = useQuery(versionsQuery(resourcesId, offset));
  return (
    <section aria-label="Versions">
      <Title order={2} size="h4">
        Versions
      </Title>
      <Answer query={versions} what="Versions">
        {(page) => (
          <>
            <ScrollArea type="auto" viewportProps={{ tabIndex: 0, "aria-label": "Table of versions", role: "region" }}>
              <Table fz="sm" miw={560}>
                <Table.Thead>
                  <Table.Tr>
                    {["Version", "Stored", "Mean reward"].map((name) => (
                      <Table.Th key={name} scope="col">
                        {name}
                      </Table.Th>
                    ))}
                  </Table.Tr>
                </Table.Thead>
                <Table.Tbody>
                  {page.items.map(({ version, update_time }) => (
                    <Table.Tr
                      key={version}
                      data-version={version}
                      aria-current={version === shown ? "true" : undefined}
                    >
                      <Table.Td className="agl-number">
                        <Anchor
                          size="sm"
                          underline="always"
                          href={href(["resources", resourcesId], { version })}
                          fw={version === shown ? 700 : 400}
                        >
                          {version}
                        </Anchor>
                      </Table.Td>
                      <Table.Td>
                        <Moment at={update_time} />
                      </Table.Td>
                      <Table.Td>{earned(version)}</Table.Td>
                    </Table.Tr>
                  ))}
                </Table.Tbody>
              </Table>
            </ScrollArea>
            {page.total > MOST ? (
              <Group gap="xs">
                <Button
                  size="xs"
                  variant="default"
                  disabled={offset === 0}
                  onClick={() => setOffset(Math.max(0, offset - MOST))}
                >
                  Newer
                </Button>
                <Button
                  size="xs"
                  variant="default"
                  disabled={offset + MOST >= page.total}
                  onClick={() => setOffset(offset + MOST)}
                >
                  Older
                </Button>
                <Text size="sm" c="dimmed">
                  {counted(page.total, "version")}
                </Text>
              </Group>
            ) : null}
          </>
        )}
      </Answer>
    </section>
  );
}

function Difference({ before, after, compared }: { before: string; after: string; compared: boolean }) {
  const [whole, setWhole] = useState(false);
  const all = useMemo(() => wordDiff(compared ? before : after, after), [compared, before, after]);
  const folded = useMemo(() => foldedPieces(all), [all]);
  const pieces = whole ? all : folded;
  return (
    <>
      {compared ? (
        <Text size="sm" c="dimmed">
          {before === after ? "Unchanged." : "Added words are underlined, removed words are struck through."}
        </Text>
      ) : null}
      <pre className="agl-text">
        {pieces.map(({ kind, text }, index) =>
          kind === "same" ? (
            visible(text)
          ) : kind === "added" ? (
            <ins key={index} className="agl-added">
              {visible(text)}
            </ins>
          ) : (
            <del key={index} className="agl-removed">
              {visible(text)}
            </del>
          ),
        )}
      </pre>
      {folded.some(({ text }, place) => text !== all[place]?.text) ? (
        <Button size="compact-xs" variant="default" onClick={() => setWhole(!whole)}>
          {whole ? "Show less" : `Show all ${bytes(new Blob([after]).size)}`}
        </Button>
      ) : null}
    </>
  );
}

function isPrompt(resource: unknown): resource is { template: unknown } {
  return typeof resource === "object" && resource !== null && "template" in resource;
}

/** The value without keys to servers, whatever the server sends. */
function withoutKeys(resource: unknown): unknown {
  return JSON.parse(JSON.stringify(resource ?? null, (key, value: unknown) => (key === "api_key" ? undefined : value)));
}

/** A prompt as its text, anything else as JSON; keys are never shown, whatever the server sends. */
function textOf(resource: unknown): string {
  if (resource === undefined) return "";
  return isPrompt(resource) ? String(resource.template) : JSON.stringify(withoutKeys(resource), null, 2);
}
