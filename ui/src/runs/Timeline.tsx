// The timeline: a grid with a row per state, which shows only the rows near the window.
import { useEffect, useLayoutEffect, useMemo, useRef, useState } from "preact/hooks";
import { counted, duration, percent } from "../charts/numbers";
import { ticksBetween } from "../charts/ticks";
import { useWidth } from "../charts/useWidth";
import type { Call, RecordingReader, RunState, Span } from "./recording";
import {
  barOf,
  collapsedAtFirst,
  endOf,
  nameOf,
  outcomeOf,
  pannedSpan,
  revealedSpan,
  rowsOf,
  spanBelow,
  visible,
  zoomedSpan,
  type Bar,
  type CallSums,
  type Row,
} from "./layout";
import { cachedShare, describeCall, labelOf, summaryOf } from "./words";

interface Props {
  readonly reader: RecordingReader;
  readonly version: number;
  readonly focused: Call | null;
  readonly onFocus: (call: Call) => void;
}

const ROW = 30; // pixels, as in runs.css
const HEAD = 25; // the axis, which stays above the rows
const MAX_HEIGHT = 560;
const CHARACTER = 6.6;
const LABEL = 60; // the room for a time on the axis

export function Timeline({ reader, version, focused, onFocus }: Props) {
  const { runs, lastS, span: whole } = reader;
  const [collapsed, setCollapsed] = useState(() => collapsedAtFirst(runs));
  const [chosen, setChosen] = useState<Span | null>(null); // null: all of it
  const [active, setActive] = useState<RunState | null>(null); // the row with the focus
  const [scrollTop, setScrollTop] = useState(0);
  const [axis, axisWidth] = useWidth<HTMLDivElement>();
  const body = useRef<HTMLDivElement>(null);
  const takesFocus = useRef(false);

  const span = chosen ?? whole;
  const rows = useMemo(() => rowsOf(runs, collapsed), [runs, version, collapsed]);
  const at = Math.max(
    0,
    rows.findIndex(({ state }) => state === active),
  );
  const height = Math.min(rows.length * ROW, MAX_HEIGHT);
  const [from, to] = visible(rows.length, ROW, scrollTop, height);
  const indices = Array.from({ length: to - from }, (_, i) => from + i);
  if (at < from || at >= to) indices.push(at); // what has the focus stays in the document

  const zoom = (factor: number): void =>
    setChosen(zoomedSpan(span, whole, factor, (span.beginS + span.toS) / 2));
  const pan = (share: number): void => setChosen(pannedSpan(span, whole, (span.toS - span.beginS) * share));
  const toggle = (state: RunState): void => {
    const next = new Set(collapsed);
    if (!next.delete(state)) next.add(state);
    setCollapsed(next);
  };
  const choose = (call: Call, row: Row): void => {
    setActive(row.state);
    onFocus(call);
    if (chosen !== null) setChosen(revealedSpan(chosen, whole, call));
  };
  const go = (index: number): void => {
    const row = rows[Math.max(0, Math.min(rows.length - 1, index))];
    if (row === undefined) return;
    setActive(row.state);
    takesFocus.current = true;
    scrollTo(rows.indexOf(row));
  };
  const scrollTo = (index: number): void => {
    const element = body.current;
    if (element === null) return;
    const [top, bottom] = [index * ROW, (index + 1) * ROW + HEAD];
    if (top < element.scrollTop) element.scrollTop = top;
    else if (bottom > element.scrollTop + element.clientHeight)
      element.scrollTop = bottom - element.clientHeight;
  };
  useLayoutEffect(() => {
    if (!takesFocus.current) return;
    takesFocus.current = false;
    const row = body.current?.querySelector<HTMLElement>(`[aria-rowindex="${at + 2}"]`);
    const isIn = focused !== null && rows[at]?.calls.includes(focused);
    (isIn ? (row?.querySelector<HTMLElement>('.bar[aria-pressed="true"]') ?? row) : row)?.focus({
      preventScroll: true,
    });
  });

  const onKeyDown = (event: KeyboardEvent): void => {
    const row = rows[at];
    if (row === undefined || event.ctrlKey || event.metaKey || event.altKey) return;
    if (!handleKey(event, row)) return;
    event.preventDefault();
  };
  /** Up and down move between states; right goes into a row's calls and left out of them, then opens and closes. */
  function handleKey(event: KeyboardEvent, row: Row): boolean {
    const inBar = (event.target as Element).closest(".bar") !== null;
    const index = inBar && focused !== null ? row.calls.indexOf(focused) : -1;
    const page = Math.max(1, Math.floor(height / ROW) - 1);
    const steps: Record<string, number> = {
      ArrowUp: at - 1,
      ArrowDown: at + 1,
      PageUp: at - page,
      PageDown: at + page,
    };
    const step = steps[event.key];
    if (step !== undefined) go(step);
    else if (event.key === "Home") go(0);
    else if (event.key === "End") go(rows.length - 1);
    else if (event.key === "ArrowRight" && !row.isOpen && !inBar) toggle(row.state);
    else if (event.key === "Enter" && !inBar) setChosen(spanBelow(row.state, whole));
    else if (event.key === "ArrowRight" && row.calls[index + 1] !== undefined)
      enter(row.calls[index + 1] as Call, row);
    else if (event.key === "ArrowLeft" && index > 0) enter(row.calls[index - 1] as Call, row);
    else if (event.key === "ArrowLeft" && inBar) go(at);
    else if (event.key === "ArrowLeft" && row.isOpen && row.hasForks) toggle(row.state);
    else if (event.key === "ArrowLeft" && row.state.parent !== null)
      go(rows.findIndex((one) => one.state === row.state.parent));
    else if (event.key === "+" || event.key === "=") zoom(1.5);
    else if (event.key === "-") zoom(1 / 1.5);
    else if (event.key === "0") setChosen(null);
    else if (event.key === "," || event.key === "<") pan(-0.25);
    else if (event.key === "." || event.key === ">") pan(0.25);
    else return false;
    if (event.key === "ArrowLeft" && inBar && index <= 0) focusRow();
    return true;
  }
  const enter = (call: Call, row: Row): void => {
    choose(call, row);
    takesFocus.current = true;
  };
  const focusRow = (): void =>
    body.current?.querySelector<HTMLElement>(`[aria-rowindex="${at + 2}"]`)?.focus();
  useWheelZoom(
    body,
    (factor, share) =>
      setChosen(zoomedSpan(span, whole, factor, span.beginS + (span.toS - span.beginS) * share)),
    pan,
  );

  return (
    <div class="panel timeline-panel">
      <div class="timeline-bar">
        <ul class="timeline-legend">
          <li>
            <span class="bar-sample" aria-hidden="true">
              <span class="bar-wait" />
            </span>
            waits and computes its prompt
          </li>
          <li>
            <span class="bar-sample" aria-hidden="true">
              <span class="bar-run" />
            </span>
            generates
          </li>
          <li>
            <span class="bar-sample is-meter" aria-hidden="true">
              <span class="bar-meter">
                <span class="bar-cached" />
              </span>
            </span>
            share of the prompt that was cached
          </li>
        </ul>
        <div class="row" role="group" aria-label="Time">
          <button type="button" aria-label="Earlier" onClick={() => pan(-0.25)} disabled={chosen === null}>
            ‹
          </button>
          <button type="button" aria-label="Later" onClick={() => pan(0.25)} disabled={chosen === null}>
            ›
          </button>
          <button type="button" aria-label="Zoom out" onClick={() => zoom(1 / 1.5)}>
            −
          </button>
          <button type="button" aria-label="Zoom in" onClick={() => zoom(1.5)}>
            +
          </button>
          <button type="button" onClick={() => setChosen(null)}>
            Fit
          </button>
          {runs.length > 1 && (
            <button
              type="button"
              onClick={() => rows[at] && setChosen(spanBelow(rows[at].state.run.root, whole))}
            >
              Fit run
            </button>
          )}
        </div>
      </div>
      <div
        class="timeline"
        role="treegrid"
        aria-label="Timeline"
        aria-rowcount={rows.length + 1}
        aria-colcount={2}
        data-testid="timeline"
        ref={body}
        style={{ height: `${height + HEAD + 2}px` }}
        onScroll={(event) => setScrollTop(event.currentTarget.scrollTop)}
        onKeyDown={onKeyDown}
      >
        <div class="timeline-head" role="row" aria-rowindex={1}>
          <div class="timeline-name" role="columnheader">
            State
          </div>
          <div class="timeline-axis" role="columnheader" ref={axis}>
            <span class="visually-hidden">Calls</span>
            <Axis span={span} width={axisWidth} />
          </div>
        </div>
        <div class="timeline-space" role="rowgroup" style={{ height: `${rows.length * ROW}px` }}>
          {indices.map((index) => {
            const row = rows[index];
            if (row === undefined) return null;
            return (
              <StateRow
                key={row.state.number}
                row={row}
                index={index}
                isActive={index === at}
                span={span}
                lastS={lastS}
                width={axisWidth}
                focused={focused}
                onChoose={(call) => choose(call, row)}
                onZoom={() => setChosen(spanBelow(row.state, whole))}
                onActive={() => setActive(row.state)}
                onToggle={() => toggle(row.state)}
              />
            );
          })}
        </div>
      </div>
    </div>
  );
}

function Axis({ span, width }: { span: Span; width: number }) {
  const shareOf = (value: number): number => (value - span.beginS) / (span.toS - span.beginS);
  const marks = ticksBetween(span.beginS, span.toS, Math.max(2, Math.floor(width / 90)));
  const last = marks[marks.length - 1] ?? 0;
  // At the end of the axis, a time stands to the left of its line, if the time before it leaves room for that.
  const isTurned = (1 - shareOf(last)) * width < LABEL;
  const hasRoom = marks.length < 2 || (shareOf(last) - shareOf(marks[marks.length - 2]!)) * width > 2 * LABEL;
  return (
    <>
      {(isTurned && !hasRoom ? marks.slice(0, -1) : marks).map((value) => (
        <span
          key={value}
          class={isTurned && value === last ? "tick is-last" : "tick"}
          style={{ left: `${shareOf(value) * 100}%` }}
        >
          {duration(value)}
        </span>
      ))}
    </>
  );
}

interface RowProps {
  readonly row: Row;
  readonly index: number;
  readonly isActive: boolean;
  readonly span: Span;
  readonly lastS: number;
  readonly width: number;
  readonly focused: Call | null;
  readonly onChoose: (call: Call) => void;
  readonly onActive: () => void;
  readonly onToggle: () => void;
  readonly onZoom: () => void;
}

function StateRow({
  row,
  index,
  isActive,
  span,
  lastS,
  width,
  focused,
  onChoose,
  onActive,
  onToggle,
  onZoom,
}: RowProps) {
  const { state, depth } = row;
  const note = endOf(state);
  return (
    <div
      class={`timeline-row${depth === 0 ? " is-root" : ""}${note === "" ? "" : " is-over"}`}
      role="row"
      aria-rowindex={index + 2}
      aria-level={depth + 1}
      aria-posinset={row.position}
      aria-setsize={row.siblings}
      aria-expanded={row.hasForks ? row.isOpen : undefined}
      tabIndex={isActive ? 0 : -1}
      style={{ transform: `translateY(${index * ROW}px)` }}
      onFocus={onActive}
      onDblClick={onZoom}
    >
      <div class="timeline-name" role="rowheader">
        <Guides row={row} />
        {row.hasForks && (
          <span class={row.isOpen ? "fold is-open" : "fold"} aria-hidden="true" onClick={onToggle} />
        )}
        <span class="state-name">{nameOf(state)}</span>
        {note && <span class="state-note">{note}</span>}
        <bdi class="state-text" title={state.failure ?? undefined}>
          {summaryOf(state)}
        </bdi>
      </div>
      <div class="timeline-calls" role="gridcell">
        {row.sums !== null && <SumsBar sums={row.sums} span={span} width={width} />}
        {row.calls.map((call) => (
          <CallBar
            key={call.number}
            call={call}
            span={span}
            lastS={lastS}
            width={width}
            isChosen={call === focused}
            onChoose={onChoose}
          />
        ))}
      </div>
    </div>
  );
}

/** The lines of the fork tree. */
function Guides({ row }: { row: Row }) {
  if (row.depth === 0) return null;
  const { guides } = row;
  const width = (guides.length + 1) * 14;
  const x = guides.length * 14 + 7;
  const lines = guides.map((goesOn, i) => (goesOn ? `M${i * 14 + 7} 0V${ROW}` : "")).join("");
  return (
    <svg class="guides" width={width} height={ROW} aria-hidden="true">
      <path d={`${lines}M${x} 0V${row.isLast ? ROW / 2 - 5 : ROW}M${x} ${ROW / 2 - 5}q0 5 5 5h2`} />
    </svg>
  );
}

interface BarProps {
  readonly call: Call;
  readonly span: Span;
  readonly lastS: number;
  readonly width: number;
  readonly isChosen: boolean;
  readonly onChoose: (call: Call) => void;
}

function CallBar({ call, span, lastS, width, isChosen, onChoose }: BarProps) {
  const bar = barOf(call, span, lastS);
  if (bar === null) return null;
  const label = labelOf(call);
  return (
    <button
      type="button"
      class={`${classOf(bar)} is-${outcomeOf(call)}`}
      tabIndex={-1}
      aria-pressed={isChosen}
      aria-label={describeCall(call)}
      title={label}
      style={placeOf(bar)}
      onClick={() => onChoose(call)}
    >
      <Inside bar={bar} width={width} label={label} cached={cachedShare(call.usage)} />
    </button>
  );
}

/** The calls of a collapsed row that has too many to show each. */
function SumsBar({ sums, span, width }: { sums: CallSums; span: Span; width: number }) {
  const bar = barOf(sums, span, sums.endS);
  if (bar === null) return null;
  const cached = sums.promptTokens > 0 ? sums.cachedTokens / sums.promptTokens : 0;
  const label = `${counted(sums.calls, "call")} · ${percent(cached)} cached`;
  return (
    <div class={`${classOf(bar)} is-sums`} title={label} style={placeOf(bar)}>
      <Inside bar={bar} width={width} label={label} cached={cached} />
    </div>
  );
}

function classOf(bar: Bar): string {
  return `bar${bar.isCutLeft ? " is-cut-left" : ""}${bar.isCutRight ? " is-cut-right" : ""}`;
}

function placeOf(bar: Bar): { left: string; width: string } {
  return { left: `min(${bar.left * 100}%, calc(100% - 6px))`, width: `max(${bar.width * 100}%, 6px)` };
}

/** `width`: of the time axis in pixels; the label needs some of it. */
function Inside({ bar, width, label, cached }: { bar: Bar; width: number; label: string; cached: number }) {
  const room = Math.floor((Math.max(bar.width * width, 6) - 10) / CHARACTER);
  return (
    <>
      <span class="bar-wait" style={{ width: `${bar.first * 100}%` }} />
      <span class="bar-run" />
      <span class="bar-meter">
        <span class="bar-cached" style={{ width: `${cached * 100}%` }} />
      </span>
      <span class="bar-label">{room >= Math.min(label.length, 10) ? label : ""}</span>
    </>
  );
}

/** Ctrl and the wheel (as pinching does) zoom; Shift and the wheel pan. */
function useWheelZoom(
  body: { current: HTMLDivElement | null },
  zoom: (factor: number, share: number) => void,
  pan: (share: number) => void,
): void {
  const act = useRef({ zoom, pan });
  act.current = { zoom, pan };
  useEffect(() => {
    const element = body.current;
    if (element === null) return;
    const onWheel = (event: WheelEvent): void => {
      const calls = element.querySelector(".timeline-calls")?.getBoundingClientRect();
      if (calls === undefined) return;
      if (event.ctrlKey || event.metaKey) {
        act.current.zoom(Math.exp(-event.deltaY / 300), (event.clientX - calls.left) / calls.width);
      } else if (event.shiftKey || Math.abs(event.deltaX) > Math.abs(event.deltaY)) {
        act.current.pan((event.deltaX || event.deltaY) / calls.width);
      } else return;
      event.preventDefault();
    };
    element.addEventListener("wheel", onWheel, { passive: false });
    return () => element.removeEventListener("wheel", onWheel);
  }, []);
}
