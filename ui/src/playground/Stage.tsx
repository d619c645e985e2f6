// The stage: the shared prefix above, a column for each branch, and below what the branches flow into.
import { useSignal, useSignalEffect } from "@preact/signals";
import type { ComponentChildren } from "preact";
import { useRef } from "preact/hooks";
import { count, counted, percent } from "../charts/numbers";
import { JsonTree } from "../json/JsonTree";
import { readPartial, type JsonNode } from "../json/partial_json";
import { Thumbnails } from "../images/Thumbnails";
import { inBatch } from "../text/batches";
import { StreamText } from "../text/stream_text";
import { useFollowEnd } from "../text/follow";
import { callsOf, type CallItem, type Item, type Lane, type TextPiece } from "./compile";
import { Fan, Rails, useLayout } from "./Fan";
import { schemaOf } from "./program";
import { isWithin, type Call, type ProgramRun } from "./run";
import { sharesOf } from "./scores";

/** A lane's items, cut at its forks. */
function segmentsOf(lane: Lane): (Item[] | Extract<Item, { kind: "fork" }>)[] {
  const segments: (Item[] | Extract<Item, { kind: "fork" }>)[] = [];
  let open: Item[] = [];
  for (const item of lane.items) {
    if (item.kind === "fork") {
      if (open.length) segments.push(open);
      open = [];
      segments.push(item);
    } else open.push(item);
  }
  if (open.length) segments.push(open);
  return segments;
}

export function Stage({ run }: { run: ProgramRun }) {
  const root = run.root.value;
  if (!root) return null;
  return (
    <div class="stage">
      <LaneBody lane={root} run={run} />
    </div>
  );
}

function LaneBody({ lane, run }: { lane: Lane; run: ProgramRun }) {
  const segments = segmentsOf(lane);
  const isRoot = lane.path === "";
  return (
    <>
      {segments.map((segment, index) =>
        Array.isArray(segment) ? (
          <div key={index} class={isRoot ? "segment panel" : "segment"}>
            {isRoot && index === 0 && segments.length > 1 && <p class="segment-name">Shared prefix</p>}
            {segment.map((one) => (
              <ItemView key={one.key} item={one} run={run} />
            ))}
          </div>
        ) : (
          <ForkView key={index} lanes={segment.lanes} run={run} joins={Array.isArray(segments[index + 1])} />
        ),
      )}
    </>
  );
}

function ForkView({ lanes, run, joins }: { lanes: Lane[]; run: ProgramRun; joins: boolean }) {
  const columns = useRef<HTMLDivElement>(null);
  const layout = useLayout(columns, lanes.length);
  const isFlowing = run.status.value === "running";
  return (
    <div class="fork" role="group" aria-label={`${lanes.length} branches`}>
      <Fan layout={layout} isFlowing={isFlowing} />
      <div class="columns-frame">
        <div class={`columns${lanes.length > 8 ? " is-many" : ""}`} ref={columns}>
          {lanes.map((lane) => (
            <BranchView key={lane.path} lane={lane} run={run} />
          ))}
        </div>
        <Rails layout={layout} joins={joins} isFlowing={isFlowing} />
      </div>
      {joins && <Fan layout={layout} isFlowing={isFlowing} isJoin />}
    </div>
  );
}

function BranchView({ lane, run }: { lane: Lane; run: ProgramRun }) {
  const isCancelled = run.cancelled.value.has(lane.path);
  const calls = [...callsOf(lane)].map(({ call }) => run.calls.get(call.key));
  const isWhole = calls.every((call) => call?.status.value === "done");
  const canCancel = run.status.value === "running" && !isCancelled && !isWhole;
  const box = useRef<HTMLElement>(null);
  const body = useRef<HTMLDivElement>(null);
  useFollowEnd(body, box, () => run.status.peek() === "running"); // of many branches, each scrolls
  return (
    <section
      ref={box}
      class={`branch panel${isCancelled ? " is-cancelled" : ""}`}
      data-testid={`branch-${lane.path}`}
      aria-label={`Branch ${lane.label}`}
    >
      <header class="branch-head">
        <h3>
          <bdi>{lane.label}</bdi>
        </h3>
        {isCancelled ? (
          <span class="chip">cancelled</span>
        ) : (
          <button
            type="button"
            class="quiet small"
            disabled={!canCancel}
            data-testid={`cancel-${lane.path}`}
            aria-label={`Cancel branch ${lane.label}`}
            onClick={() => run.cancelBranch(lane.path)}
          >
            Cancel
          </button>
        )}
      </header>
      <div class="branch-body" ref={body}>
        <LaneBody lane={lane} run={run} />
      </div>
    </section>
  );
}

function ItemView({ item, run }: { item: Item; run: ProgramRun }) {
  switch (item.kind) {
    case "turn":
      return (
        <div class="turn">
          {run.hasTurns && <span class="role">{item.role}</span>}
          <Thumbnails label="Images" images={item.images} />
          {item.text.length > 0 && (
            <p class="model-text turn-text" dir="auto" tabIndex={lengthOf(item.text) > 500 ? 0 : -1}>
              <Pieces pieces={item.text} run={run} />
            </p>
          )}
        </div>
      );
    case "join": {
      const cancelled = [...run.cancelled.value];
      const joined = item.results.filter(({ path }) => !cancelled.some((one) => isWithin(path, one)));
      return (
        <div class="turn">
          {run.hasTurns && <span class="role">user</span>}
          <div class="model-text turn-text" dir="auto">
            {item.before.length > 0 && (
              <p>
                <Pieces pieces={item.before} run={run} />
              </p>
            )}
            <p class="joined" data-testid="joined">
              {joined.slice(0, 12).map(({ label, path }) => (
                <span key={path} class="chip">
                  {label}
                </span>
              ))}
              {joined.length > 12 && <span class="chip">and {joined.length - 12} more</span>}
            </p>
            {item.after.length > 0 && (
              <p>
                <Pieces pieces={item.after} run={run} />
              </p>
            )}
          </div>
        </div>
      );
    }
    case "fork":
      return null;
    default: {
      const call = run.calls.get(item.key);
      return call ? <CallView item={item} call={call} run={run} /> : null;
    }
  }
}

const lengthOf = (pieces: readonly TextPiece[]) =>
  pieces.reduce((sum, piece) => sum + (typeof piece === "string" ? piece.length : 0), 0);

/** A text with the values of the calls that it refers to. */
function Pieces({ pieces, run }: { pieces: readonly TextPiece[]; run: ProgramRun }) {
  return (
    <>
      {pieces.map((piece, index) => {
        if (typeof piece === "string") return piece;
        const call = run.calls.get(piece.key);
        return call ? <Value key={index} name={piece.name} call={call} /> : `{${piece.name}}`;
      })}
    </>
  );
}

/** The value of a call in the text of another turn; its name, until there is some of it. */
function Value({ name, call }: { name: string; call: Call }) {
  const text = useSignal("");
  useSignalEffect(() => call.variable.value?.onChange((variable) => (text.value = variable.text.trim())));
  if (text.value === "") return <span class="chip">{name}</span>;
  return (
    <bdi class="value" title={name}>
      {text.value}
    </bdi>
  );
}

/** With more calls, their texts change together. */
const WIDE = 24;

const WORDS = { waiting: "waits", running: "streams", done: "done", cancelled: "cancelled", failed: "failed" };

function CallView({ item, call, run }: { item: CallItem; call: Call; run: ProgramRun }) {
  const { step } = item;
  const status = call.status.value;
  const isWide = run.calls.size > WIDE;
  const isCut = call.finishReason.value === "length";
  const schema = step.kind === "gen" && step.shape.kind === "schema" ? schemaOf(step.shape.source) : null;
  const isText = step.kind === "gen" && !schema;
  const lead = item.lead.length > 0 && <Pieces pieces={item.lead} run={run} />;
  return (
    <div class={`call is-${status}`} data-status={status} data-testid={`call-${call.key}`}>
      <div class="call-head">
        {run.hasTurns && <span class="role">assistant</span>}
        <code class="name">{step.name}</code>
        <span class={`call-status${isCut ? " is-cut" : ""}`}>
          {isCut ? `cut at ${counted(call.usage.value?.output_tokens ?? 0, "token")}` : WORDS[status]}
        </span>
      </div>
      {lead && !isText && (
        <span class="call-lead model-text" dir="auto">
          {lead}
        </span>
      )}
      {step.kind === "select" ? (
        <Shares call={call} choices={step.choices} />
      ) : schema ? (
        <>
          <TypedText call={call} schema={schema} />
          <details class="raw" open>
            <summary>Text</summary>
            <Streamed call={call} isWide={isWide} />
          </details>
        </>
      ) : (
        <Streamed call={call} isWide={isWide} lead={lead} />
      )}
      {call.problem.value && (
        <p class="problem" dir="auto">
          {call.problem.value}
        </p>
      )}
      <Prompt call={call} />
    </div>
  );
}

const MAX_MARKED_CHARS = 100_000;

/** The text of a call, as it streams; forced parts are marked when it is complete. It continues its lead's line. */
function Streamed({ call, isWide, lead }: { call: Call; isWide: boolean; lead?: ComponentChildren }) {
  const host = useRef<HTMLDivElement>(null);
  const whole = useRef<HTMLDivElement>(null);
  const box = useRef<HTMLDivElement>(null);
  useFollowEnd(whole, box, () => true);
  useSignalEffect(() => {
    const variable = call.variable.value;
    const forced = call.forced.value;
    if (!host.current || !variable) return;
    const text = new StreamText(host.current);
    if (forced.length && call.text.length < MAX_MARKED_CHARS) {
      text.mark(call.text, forced, "forced", "Forced by the schema or pattern: not sampled");
      return;
    }
    // What an earlier attempt streamed stays until this one replaces it.
    let isOld = true;
    const append = (added: string): void => {
      if (isOld && (added || (variable.done && !variable.error))) {
        text.clear();
        isOld = false;
      }
      text.append(added);
    };
    if (!isWide) return variable.onChange((_, added) => append(added));
    let waiting = "";
    let isOver = false;
    const show = (): void => {
      if (!isOver) append(waiting);
      waiting = "";
    };
    const unsubscribe = variable.onChange((_, added) => {
      if (!waiting && (added || variable.done)) inBatch(show);
      waiting += added;
    });
    return () => {
      isOver = true;
      unsubscribe();
    };
  });
  return (
    <div ref={box} class="streamed">
      <div ref={whole} dir="auto">
        {lead && <span class="call-lead model-text">{lead}</span>}
        <div ref={host} class="model-text" data-testid={`text-${call.key}`} dir="auto" />
      </div>
    </div>
  );
}

const TREE_EVERY_MS = 100;
const MAX_TREE_CHARS = 50_000;

/** A constrained value as a tree, read anew from the text at most ten times a second. */
function TypedText({ call, schema }: { call: Call; schema: Record<string, unknown> }) {
  const node = useSignal<JsonNode | null>(null);
  useSignalEffect(() => {
    const variable = call.variable.value;
    if (!variable) return;
    let timer: ReturnType<typeof setTimeout> | undefined;
    const read = (): void => {
      timer = undefined;
      if (variable.text.length <= MAX_TREE_CHARS) node.value = readPartial(variable.text);
    };
    const unsubscribe = variable.onChange(() => {
      if (variable.done) read();
      else timer ??= setTimeout(read, TREE_EVERY_MS);
    });
    return () => {
      clearTimeout(timer);
      unsubscribe();
    };
  });
  return <JsonTree node={node.value} schema={schema} />;
}

function Shares({ call, choices }: { call: Call; choices: string[] }) {
  const scores = call.scores.value;
  if (!scores) {
    return (
      <p class="choices">
        {choices.filter(Boolean).map((choice) => (
          <span key={choice} class="chip" dir="auto">
            {choice}
          </span>
        ))}
      </p>
    );
  }
  const shares = sharesOf(scores);
  return (
    <figure class="shares">
      <table>
        <tbody>
          {shares.map(({ choice, share, score }, index) => (
            <tr key={choice} class={index === 0 ? "is-chosen" : ""}>
              <th scope="row" dir="auto">
                {choice}
                {index === 0 && <span class="visually-hidden"> (selected)</span>}
              </th>
              <td class="share-bar">
                <span style={{ width: `${(share * 100).toFixed(1)}%` }} />
              </td>
              <td class="number" title={`score ${score.toFixed(3)}`}>
                {percent(share)}
              </td>
            </tr>
          ))}
        </tbody>
      </table>
      <figcaption>Softmax of the scores that decided: the mean log-probability of each choice's tokens.</figcaption>
    </figure>
  );
}

/** How much of the prompt was in the cache, as a bar; opened, the prompt's text with that part tinted. */
function Prompt({ call }: { call: Call }) {
  const usage = call.usage.value;
  if (!usage?.prompt_tokens) return null;
  const cached = usage.cached_tokens ?? 0;
  const share = cached / usage.prompt_tokens;
  const forced = usage.forced_tokens ?? 0;
  const tokens = call.promptTokens.value;
  const line = (
    <>
      <span class="cache-bar" aria-hidden="true">
        <span style={{ width: `${(share * 100).toFixed(1)}%` }} />
      </span>
      <span>
        {count(cached)} of {count(usage.prompt_tokens)} prompt tokens cached
        {usage.output_tokens ? `, ${usage.output_tokens} generated` : ""}
        {forced ? `, ${forced} of them forced` : ""}
      </span>
    </>
  );
  if (!tokens) return <p class="prompt-line">{line}</p>;
  return (
    <details class="prompt">
      <summary class="prompt-line">{line}</summary>
      <p class="model-text prompt-text" dir="auto" tabIndex={0}>
        <span class="cached" title="From the cache">
          {tokens.slice(0, cached).join("")}
        </span>
        <span>{tokens.slice(cached).join("")}</span>
      </p>
    </details>
  );
}
