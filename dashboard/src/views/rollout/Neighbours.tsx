/** The way to the rollouts before and after this one, in the list that it was opened from. */

import { Anchor, Button, Group, Text } from "@mantine/core";
import { useHotkeys } from "@mantine/hooks";
import { useQuery } from "@tanstack/react-query";

import { summariesQuery } from "../../api/questions.ts";
import type { SearchValues } from "../../pure/address.ts";
import { href } from "../../pure/address.ts";
import { filterOf } from "../../pure/filters.ts";
import { count } from "../../pure/format.ts";
import { carried, type Place } from "../../pure/place.ts";
import { orderOf } from "../rollouts/order.ts";

/** So many on either side: a list that others write to moves by a few places while one reads. */
const SIDE = 20;

interface Props {
  rolloutId: string;
  place: Place;
  search: SearchValues;
}

export function Neighbours({ rolloutId, place, search }: Props) {
  const offset = Math.max(0, place.at - SIDE);
  const around = useQuery(summariesQuery(filterOf(place.search), orderOf(place.search), offset, 2 * SIDE + 1));
  const items = around.data?.items ?? [];
  const here = items.findIndex((row) => row.rollout_id === rolloutId);
  const linkTo = (step: number): string | undefined => {
    const row = here < 0 ? undefined : items[here + step];
    const kept = { tab: search.tab, ...carried(place.search, offset + here + step) };
    return row && href(["rollouts", row.rollout_id], kept);
  };
  const before = linkTo(-1);
  const after = linkTo(1);
  const go = (link: string | undefined): void => {
    if (link) window.location.hash = link;
  };
  useHotkeys([
    ["j", () => go(after)],
    ["k", () => go(before)],
  ]);
  return (
    <Group gap="xs" component="nav" aria-label="Rollouts of the list">
      <Button
        size="xs"
        variant="default"
        disabled={!before}
        onClick={() => go(before)}
        title="Previous rollout in the list (k)"
      >
        ‹ Previous
      </Button>
      <Button
        size="xs"
        variant="default"
        disabled={!after}
        onClick={() => go(after)}
        title="Next rollout in the list (j)"
      >
        Next ›
      </Button>
      <Text size="sm" c="dimmed" className="agl-number" data-place={here < 0 ? undefined : offset + here}>
        {around.data === undefined
          ? ""
          : here < 0
            ? "This rollout is no longer in the list. "
            : `${count(offset + here + 1)} of ${count(around.data.total)}. `}
        <Anchor size="sm" underline="always" href={href(["rollouts"], place.search)}>
          Back to the list
        </Anchor>
      </Text>
    </Group>
  );
}
