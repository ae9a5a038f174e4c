/** The tokens as flowing text, drawn by lines that are in view. A grid of one tab stop: arrow keys choose a token. */

import { useElementSize } from "@mantine/hooks";
import { useVirtualizer } from "@tanstack/react-virtual";
import { memo, useLayoutEffect, useMemo, useRef, useState, type KeyboardEvent } from "react";

import { counted } from "../../pure/format.ts";
import { linesOf } from "../../pure/lines.ts";
import type { RowPart } from "../../pure/tokenStatistics.ts";
import type { TokenAt } from "../../pure/tokenRows.ts";

const LINE = 22;
const MOST_HEIGHT = 520;
/** Pixels left of the tokens, where the name of their part stands. */
const GUTTER = 76;
const PROBE = "0".repeat(10);

/** A part of the row, and how it is called beside its first line. */
export interface NamedPart extends RowPart {
  name: string;
}

interface Props {
  tokens: TokenAt[];
  texts: string[];
  /** Places whose token has bytes that are only a part of a character. */
  partial: ReadonlySet<number>;
  parts: readonly NamedPart[];
  colours: (string | null)[];
  chosen: TokenAt | null;
  choose: (token: TokenAt | null) => void;
}

export function TokenText({ tokens, texts, partial, parts, colours, chosen, choose }: Props) {
  const { ref, width } = useElementSize();
  const scroller = useRef<HTMLDivElement>(null);
  const probe = useRef<HTMLSpanElement>(null);
  const [character, setCharacter] = useState(8);
  useLayoutEffect(() => {
    const measured = (probe.current?.getBoundingClientRect().width ?? 0) / PROBE.length;
    if (measured > 0) setCharacter(measured);
  }, [width]);
  const room = Math.max(20, Math.floor((width - 24 - GUTTER) / character));
  const begins = useMemo(() => new Map(parts.map((part) => [part.from, part.name])), [parts]);
  const lines = useMemo(
    () =>
      linesOf(
        texts.map((text) => Math.min(text.length, 60)),
        room,
        new Set(begins.keys()),
      ),
    [texts, room, begins],
  );
  const virtual = useVirtualizer({
    count: lines.length,
    getScrollElement: () => scroller.current,
    estimateSize: () => LINE,
    overscan: 10,
  });
  const move = (event: KeyboardEvent): void => {
    const pace = {
      ArrowRight: 1,
      ArrowLeft: -1,
      ArrowDown: 12,
      ArrowUp: -12,
      Home: -tokens.length,
      End: tokens.length,
    }[event.key];
    if (pace === undefined) return;
    event.preventDefault();
    const next = Math.max(0, Math.min(tokens.length - 1, (chosen?.at ?? (pace > 0 ? -1 : 0)) + pace));
    choose(tokens[next] ?? null);
    virtual.scrollToIndex(
      lines.findIndex((line) => next < line.to),
      { align: "auto" },
    );
  };
  return (
    <div ref={ref}>
      <div
        ref={scroller}
        className="agl-tokens"
        style={{ height: Math.min(MOST_HEIGHT, lines.length * LINE + 10) }}
        tabIndex={0}
        role="listbox"
        aria-label={counted(tokens.length, "token")}
        aria-activedescendant={chosen ? `token-${chosen.at}` : undefined}
        onKeyDown={move}
      >
        <span ref={probe} aria-hidden className="agl-probe">
          {PROBE}
        </span>
        <div style={{ height: virtual.getTotalSize(), position: "relative" }}>
          {virtual.getVirtualItems().map(({ index, start }) => {
            const line = lines[index];
            return line ? (
              <Line
                key={index}
                from={line.from}
                to={line.to}
                top={start}
                part={begins.get(line.from)}
                tokens={tokens}
                texts={texts}
                partial={partial}
                colours={colours}
                chosen={chosen && chosen.at >= line.from && chosen.at < line.to ? chosen.at : -1}
                choose={choose}
              />
            ) : null;
          })}
        </div>
      </div>
    </div>
  );
}

interface LineProps {
  from: number;
  to: number;
  top: number;
  part: string | undefined;
  tokens: TokenAt[];
  texts: string[];
  partial: ReadonlySet<number>;
  colours: (string | null)[];
  chosen: number;
  choose: (token: TokenAt | null) => void;
}

const Line = memo(function Line({ from, to, top, part, tokens, texts, partial, colours, chosen, choose }: LineProps) {
  return (
    <div className="agl-token-line" style={{ transform: `translateY(${top}px)`, paddingInlineStart: GUTTER }}>
      {part === undefined ? null : (
        <span className="agl-token-part" aria-hidden data-part={part} style={{ width: GUTTER }}>
          {part}
        </span>
      )}
      {tokens.slice(from, to).map((token) => {
        const clipped = Boolean(token.figures.clipped);
        const colour = colours[token.at];
        const begins = token.call >= 0 && tokens[token.at - 1]?.call !== token.call;
        return (
          <span
            key={token.at}
            id={`token-${token.at}`}
            role="option"
            aria-selected={token.at === chosen}
            className={`agl-token${token.trained ? "" : " agl-untrained"}${clipped ? " agl-clipped" : ""}${partial.has(token.at) ? " agl-partial" : ""}${colour ? " agl-coloured" : ""}${begins ? " agl-begins" : ""}`}
            data-call={begins ? token.call + 1 : undefined}
            style={colour ? { backgroundColor: colour } : undefined}
            onMouseEnter={() => choose(token)}
            onClick={() => choose(token)}
          >
            {(texts[token.at] ?? "").slice(0, 60)}
          </span>
        );
      })}
    </div>
  );
});
