/** The parts that several views share, in all their states: `npm run storybook`. */

import { Group, Text } from "@mantine/core";

import { ApiError } from "../api/client.ts";
import { Facts } from "./Facts.tsx";
import { Json } from "./Json.tsx";
import { LongText } from "./LongText.tsx";
import { Moment } from "./Moment.tsx";
import { Empty, Failure, Loading, Missing } from "./States.tsx";
import { StatusBadge, statuses } from "./StatusBadge.tsx";

export default { title: "Parts" };

const retry = (): void => undefined;

export const StateLoading = () => <Loading what="rollouts" />;
export const StateEmpty = () => (
  <Empty title="No rollout matches">
    <Text size="sm">Clear the filters.</Text>
  </Empty>
);
export const StateMissing = () => <Missing what="Rollout ro-1" message="no rollout ro-1" />;
export const StateGone = () => <Failure error={new ApiError(410, "removed")} what="Rollout ro-1" />;
export const StateDenied = () => <Failure error={new ApiError(401, "no token")} what="Runs" retry={retry} />;
export const StateError = () => <Failure error={new Error("502 Bad Gateway")} what="Runs" retry={retry} />;
export const StatusBadges = () => (
  <Group gap="xs">
    {[...statuses, "a_status_of_tomorrow", null].map((status) => (
      <StatusBadge key={status} status={status} />
    ))}
  </Group>
);
export const FactsOfARollout = () => (
  <Facts
    facts={[
      ["Status", <StatusBadge key="status" status="succeeded" />],
      ["Worker", "vm-1-0"],
      ["Reward", null],
    ]}
  />
);
export const RawJson = () => <Json value={{ question: "What is 17 times 23?", answers: [391] }} />;
export const TextShort = () => <LongText text="Text of an agent, <b>not HTML</b>, and \u202e turned round" />;
export const TextLong = () => <LongText text={"All work and no play. ".repeat(400)} mono />;
export const Moments = () => (
  <Text>
    <Moment at={1_750_000_000.5} /> <Moment at={null} />
  </Text>
);
