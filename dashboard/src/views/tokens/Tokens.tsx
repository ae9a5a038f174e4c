/** The tokens of a rollout's rows, coloured by what the loss used of them. Nothing here is computed anew: the numbers
 * are those that the training loop wrote into the ledger. */

import { Group, Select, Stack, Text } from "@mantine/core";
import { useQuery } from "@tanstack/react-query";
import { useCallback, useMemo, useState } from "react";

import { explanationQuery, ledgerQuery, tokenTextsQuery } from "../../api/questions.ts";
import type { CallExplanation, LedgerCall, LedgerData, LedgerRow } from "../../api/types.ts";
import { useAddress } from "../../app/useAddress.ts";
import { LongText } from "../../parts/LongText.tsx";
import { Answer, Empty } from "../../parts/States.tsx";
import { count, counted, decimal } from "../../pure/format.ts";
import {
  COLOURINGS,
  colourOf,
  FIGURES,
  rangeOf,
  shownToken,
  tokensOf,
  valueOf,
  type Colouring,
  type Figure,
  type TokenAt,
} from "../../pure/tokenRows.ts";
import { partsOf } from "../../pure/tokenStatistics.ts";
import { named } from "../../pure/visible.ts";
import { RowFigures } from "./RowFigures.tsx";
import { TokenText, type NamedPart } from "./TokenText.tsx";

export function Tokens({ rolloutId, runId }: { rolloutId: string; runId: string | null }) {
  const record = useQuery(ledgerQuery(runId, rolloutId));
  const explanation = useQuery(explanationQuery(rolloutId));
  const calls = explanation.data?.calls ?? [];
  const seams = explanation.data?.rows ? explanation.data.notes : []; // without rows, the notes are advice
  if (explanation.data?.untrained)
    return <NoLedger calls={[]} text={`Nothing of this rollout is trained: ${named(explanation.data.untrained)}.`} />;
  if (runId === null) return <NoLedger calls={calls} text="This rollout belongs to no run, so it is in no ledger." />;
  if (record.isSuccess && record.data === null) {
    return (
      <NoLedger
        calls={calls}
        text="The ledger of the run has no record of this rollout: it was not sampled for training, or its step has not ended yet."
      />
    );
  }
  return (
    <Answer query={record} what="Tokens">
      {({ data, step }) => <Rows data={data as unknown as LedgerData} step={step} calls={calls} seams={seams} />}
    </Answer>
  );
}

interface RowsProps {
  data: LedgerData;
  step: number;
  calls: CallExplanation[];
  /** Where rows of the rollout part from the call before them, in words. */
  seams: string[];
}

function Rows({ data, step, calls, seams }: RowsProps) {
  const [search, change] = useAddress();
  const colouring = (search.colour && search.colour in COLOURINGS ? search.colour : "logprob") as Colouring;
  const rows = data.rows ?? [];
  if (!rows.length) {
    return (
      <NoLedger
        calls={calls}
        text={
          data.calls.some((call) => call.ending === "trained")
            ? "The tokens of this rollout's rows are not stored. Set record_tokens of the algorithm to store them."
            : "No call of this rollout was trained, so the loss used none of its tokens."
        }
      />
    );
  }
  return (
    <Stack gap="md">
      <Group gap="md" align="flex-end">
        <Select
          label="Colour tokens by"
          size="xs"
          w={210}
          allowDeselect={false}
          data={Object.entries(COLOURINGS).map(([value, { label }]) => ({ value, label }))}
          value={colouring}
          onChange={(value) => change({ colour: value ?? undefined })}
        />
        <Text size="sm">
          Tokens in the loss of step {step}. Advantage of the rollout {decimal(data.advantage)}, reward{" "}
          {decimal(data.reward)}. Prompt and tool tokens are not trained and are grey. A bar marks the start of each
          reply.
        </Text>
      </Group>
      {rows.map((row) => (
        <Row key={row.row} row={row} data={data} colouring={colouring} calls={calls} />
      ))}
      {seams.length ? (
        <section aria-label="Reasons for new rows">
          <Text size="sm" fw={600}>
            Reasons for new rows
          </Text>
          {seams.map((seam) => (
            <LongText key={seam} text={seam} mono />
          ))}
        </section>
      ) : null}
      <Untrained calls={calls} />
    </Stack>
  );
}

function Row({
  row,
  data,
  colouring,
  calls,
}: {
  row: LedgerRow;
  data: LedgerData;
  colouring: Colouring;
  calls: CallExplanation[];
}) {
  const tokens = useMemo(() => tokensOf(row, data.calls), [row, data]);
  const known = useQuery(
    tokenTextsQuery(
      row.vocabulary,
      useMemo(() => tokens.map(({ id }) => id), [tokens]),
    ),
  );
  const range = useMemo(() => rangeOf(tokens, colouring), [tokens, colouring]);
  const [chosen, setChosen] = useState<TokenAt | null>(null);
  const texts = useMemo(
    () => tokens.map((token) => shownToken(known.data?.get(token.id)?.text, token.id)),
    [tokens, known.data],
  );
  const partial = useMemo(
    () => new Set(tokens.filter((token) => known.data?.get(token.id)?.partial).map((token) => token.at)),
    [tokens, known.data],
  );
  const numberOf = useCallback(
    (index: number): number => {
      const found = data.calls[index];
      const same = calls.find((call) => call.call_id === found?.call_id && call.attempt_id === found.attempt_id);
      return same?.number ?? index + 1;
    },
    [data, calls],
  );
  const parts: NamedPart[] = useMemo(
    () => partsOf(tokens).map((part) => ({ ...part, name: part.trained ? `reply ${numberOf(part.call)}` : "prompt" })),
    [tokens, numberOf],
  );
  const colours = useMemo(
    () => tokens.map((token) => colourOf(valueOf(token, colouring), range, colouring)),
    [tokens, range, colouring],
  );
  const trained = tokens.filter((token) => token.trained).length;
  const first = calls.find((call) => call.ledger?.row === row.row && call.begins);
  return (
    <section aria-label={`Row ${row.row}`} data-row={row.row}>
      <Text size="sm" fw={600}>
        Row {row.row}: {counted(tokens.length, "token")}, {count(trained)} trained
        {row.policy ? ` · policy ${named(row.policy, 60)}` : ""}
        {first?.begins ? (
          <Text span size="sm" c="dimmed">
            {" "}
            · starts with call {first.number}: {first.begins.replaceAll("_", " ")}
          </Text>
        ) : null}
        {partial.size ? (
          <Text span size="sm" c="dimmed">
            {" "}
            · {counted(partial.size, "token")} with part of a character, shown as bytes and dotted
          </Text>
        ) : null}
      </Text>
      <Legend range={range} colouring={colouring} />
      <RowFigures tokens={tokens} range={range} colouring={colouring} />
      <TokenText
        tokens={tokens}
        texts={texts}
        partial={partial}
        parts={parts}
        colours={colours}
        choose={setChosen}
        chosen={chosen}
      />
      <Chosen
        token={chosen}
        text={chosen ? (texts[chosen.at] ?? "") : ""}
        partial={chosen !== null && partial.has(chosen.at)}
        row={row}
        call={chosen && chosen.call >= 0 ? { number: numberOf(chosen.call), ledger: data.calls[chosen.call] } : null}
      />
    </section>
  );
}

const said: Partial<Record<Colouring, (low: number, high: number) => [string, string]>> = {
  ratio: (low, high) => [decimal(Math.exp(low)), decimal(Math.exp(high))],
};

function Legend({ range: [low, high], colouring }: { range: [number, number]; colouring: Colouring }) {
  const { kind, label } = COLOURINGS[colouring];
  if (kind === "classes") {
    return (
      <Text size="xs" c="dimmed">
        {colouring === "mask"
          ? "Blue: trained. No colour: not trained."
          : "Orange and underlined: the ratio was clipped. Pale blue: the ratio was not clipped."}
      </Text>
    );
  }
  const [left, right] = (said[colouring] ?? ((a: number, b: number) => [decimal(a), decimal(b)]))(low, high);
  const stops = [0, 0.25, 0.5, 0.75, 1].map(
    (share) => colourOf(low + (high - low) * share, [low, high], colouring) ?? "",
  );
  return (
    <Group gap={6}>
      <Text size="xs" className="agl-number">
        {left}
      </Text>
      <span
        className="agl-scale"
        aria-hidden
        style={{ background: `linear-gradient(to right, ${stops.join(", ")})` }}
      />
      <Text size="xs" className="agl-number">
        {right}
      </Text>
      <Text size="xs" c="dimmed">
        {label.toLowerCase()}
      </Text>
    </Group>
  );
}

const clips = ["no", "at the lower limit", "at the upper limit", "at delta"];

interface ChosenProps {
  token: TokenAt | null;
  text: string;
  partial: boolean;
  row: LedgerRow;
  /** Whose answer the token belongs to. */
  call: { number: number; ledger: LedgerCall | undefined } | null;
}

function Chosen({ token, text, partial, row, call }: ChosenProps) {
  if (!token) {
    return (
      <Text size="xs" c="dimmed" mih={40}>
        Point at a token, or select one with the arrow keys, to see its values in the loss.
      </Text>
    );
  }
  const weights = call?.ledger?.weight_version ?? null;
  const { engine_logprobs: engine, trainer_logprobs: trainer } = token.figures;
  const facts = [
    `token ${token.at} of row ${row.row}`,
    `id ${token.id}`,
    `“${text}”${partial ? ", part of a character" : ""}`,
    token.trained ? `trained, reply of call ${call?.number ?? "?"}` : "not trained: prompt",
    weights === null ? null : `sampled by weights ${weights}`,
    ...(Object.entries(token.figures) as [Figure, number][]).map(([name, number]) =>
      name === "clipped" ? `clipped: ${clips[number] ?? number}` : `${FIGURES[name]} ${decimal(number, 4)}`,
    ),
    engine === undefined || trainer === undefined ? null : `trainer − engine ${decimal(trainer - engine, 4)}`,
  ];
  return (
    <Text size="xs" mih={40} role="status" className="agl-number" data-testid="token-facts">
      {facts.filter(Boolean).join(" · ")}
    </Text>
  );
}

function Untrained({ calls }: { calls: CallExplanation[] }) {
  const left = calls.filter((call) => call.ledger?.ending !== "trained");
  if (!left.length) return null;
  return (
    <section aria-label="Untrained calls">
      <Text size="sm" fw={600}>
        Untrained calls
      </Text>
      {left.map((call) => (
        <Text key={`${call.attempt_id} ${call.call_id}`} size="sm">
          Call {call.number}: {named((call.ledger?.reason ?? call.reason ?? "not in the ledger").replaceAll("_", " "))}
          {call.has_tokens ? "" : "; token ids not recorded"}
          {call.what_to_try ? `; ${call.what_to_try}` : ""}
        </Text>
      ))}
    </section>
  );
}

function NoLedger({ calls, text }: { calls: CallExplanation[]; text: string }) {
  return (
    <Stack>
      <Empty title="No token data">
        <Text size="sm" c="dimmed" ta="center">
          {text}
        </Text>
      </Empty>
      <Untrained calls={calls} />
    </Stack>
  );
}
