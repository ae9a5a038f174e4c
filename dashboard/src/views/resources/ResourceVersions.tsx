import { Anchor, Group, NumberInput, Stack, Text, Title } from "@mantine/core";
import { queryOptions, useQuery } from "@tanstack/react-query";
import { useParams, useSearch } from "@tanstack/react-router";

import { call, part } from "../../api/client.ts";
import { aggregateQuery, resourceQuery } from "../../api/questions.ts";
import type { ResourcesUpdate } from "../../api/types.ts";
import { Facts } from "../../parts/Facts.tsx";
import { Moment } from "../../parts/Moment.tsx";
import { Answer } from "../../parts/States.tsx";
import { href } from "../../pure/address.ts";
import { count, decimal } from "../../pure/format.ts";
import { visible } from "../../pure/visible.ts";
import { wordDiff } from "../../pure/words.ts";

const latestQuery = (resourcesId: string) =>
  queryOptions({
    queryKey: ["resources", "latest", resourcesId],
    queryFn: ({ signal }) => call<ResourcesUpdate | null>(`/resources/${part(resourcesId)}`, { signal }),
  });

/** One version of a set of resources beside an earlier one: what changed, word by word, and what each earned. */
export function ResourceVersions() {
  const { resourcesId } = useParams({ strict: false }) as { resourcesId: string };
  const latest = useQuery(latestQuery(resourcesId));
  return (
    <Stack gap="md" maw={960}>
      <Title order={1} size="h2" className="agl-text">
        {resourcesId}
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
    const interval = group?.stderr ? ` ± ${decimal(1.96 * group.stderr)} (95 %)` : "";
    return (
      <>
        {decimal(group?.mean)}
        {interval}, {count(group?.count ?? 0)} rollouts{" "}
        <Anchor size="sm" underline="always" href={href(["rollouts"], { resources: resourcesId, version: number })}>
          show those of version {number}
        </Anchor>
      </>
    );
  };
  return (
    <>
      <Group gap="sm">
        <NumberInput label="Version" min={1} max={last} value={version} onChange={(value) => show({ version: value })} w={120} />
        <NumberInput label="Against" min={1} max={last} value={before} onChange={(value) => show({ before: value })} w={120} />
      </Group>
      <Answer query={now} what={`Version ${version}`}>
        {(update) => (
          <>
            <Facts
              facts={[
                ["Stored", <Moment key="stored" at={update.update_time} />],
                [`Mean reward, version ${version}`, earned(version)],
                ...(before === version ? [] : ([[`Mean reward, version ${before}`, earned(before)]] as [string, React.ReactNode][])),
              ]}
            />
            {Object.entries(update.resources).map(([name, value]) => (
              <section key={name} aria-label={name}>
                <Title order={2} size="h4" className="agl-text">
                  {visible(name)}
                </Title>
                <Difference before={textOf(then.data?.resources[name])} after={textOf(value)} compared={before !== version && Boolean(then.data)} />
              </section>
            ))}
          </>
        )}
      </Answer>
    </>
  );
}

function Difference({ before, after, compared }: { before: string; after: string; compared: boolean }) {
  const pieces = wordDiff(compared ? before : after, after);
  return (
    <>
      {compared ? (
        <Text size="sm" c="dimmed">
          {before === after ? "Unchanged." : "Added words are underlined, removed ones struck through."}
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
    </>
  );
}

/** A prompt as its text, anything else as JSON; keys are never shown, whatever the server sends. */
function textOf(resource: unknown): string {
  if (resource === undefined) return "";
  if (typeof resource === "object" && resource !== null && "template" in resource) return String(resource.template);
  return JSON.stringify(resource, (key, value: unknown) => (key === "api_key" ? undefined : value), 2);
}
