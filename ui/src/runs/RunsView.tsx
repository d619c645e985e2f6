// Recordings as a timeline: those of files, and the runs of this page's session.
import { useEffect, useLayoutEffect, useRef, useState } from "preact/hooks";
import { announce } from "../app/announce";
import { hrefOf } from "../app/router";
import { View } from "../app/View";
import { count, counted, duration, percent } from "../charts/numbers";
import { CallDetails } from "./CallDetails";
import { endingOf } from "./file";
import type { Call, RecordingReader } from "./recording";
import { sessionLog, sessionLogs } from "./sessionLog";
import { openFile, opened, showSession, useSessionRuns, type SessionRuns } from "./sources";
import { Timeline } from "./Timeline";
import "../charts/charts.css";
import "./runs.css";

export default function RunsView() {
  const session = useSessionRuns();
  const [isOver, setOver] = useState(false);
  const picker = useRef<HTMLInputElement>(null);
  const now = opened.value;
  const open = (files: FileList | null | undefined): void => {
    const file = files?.[0];
    if (file !== undefined) void openFile(file);
  };
  return (
    <div
      class={isOver ? "runs-drop is-over" : "runs-drop"}
      onDragOver={(event) => {
        event.preventDefault();
        setOver(true);
      }}
      onDragLeave={(event) => {
        if (!event.currentTarget.contains(event.relatedTarget as Node | null)) setOver(false);
      }}
      onDrop={(event) => {
        event.preventDefault();
        setOver(false);
        open(event.dataTransfer?.files);
      }}
    >
      <View
        name="runs"
        title="Runs"
        lead="The fork tree of each run on the left, time on the right: when each call waited, when it generated, and how much of its prompt was in the cache. Open a recording, or drop one here."
        actions={
          <>
            <input
              ref={picker}
              hidden
              type="file"
              accept=".jsonl,.json,.txt,application/jsonl"
              data-testid="recording-file"
              onChange={(event) => {
                open(event.currentTarget.files);
                event.currentTarget.value = "";
              }}
            />
            {now.kind !== "session" && (
              <button type="button" onClick={showSession}>
                This page's runs
              </button>
            )}
            {now.kind === "session" && sessionLogs.value.length > 1 && (
              <select
                aria-label="Session"
                value={String(sessionLogs.value.indexOf(sessionLog.value))}
                onChange={(event) => {
                  sessionLog.value = sessionLogs.peek()[Number(event.currentTarget.value)]!;
                }}
              >
                {sessionLogs.value.map((log, index) => (
                  <option key={index} value={String(index)}>
                    Session of {log.started}
                  </option>
                ))}
              </select>
            )}
            {now.kind === "session" && session.reader.runs.length > 0 && (
              <button type="button" onClick={() => save(session)}>
                Save as a recording
              </button>
            )}
            <button type="button" class="primary" onClick={() => picker.current?.click()}>
              Open a recording
            </button>
          </>
        }
      >
        {now.kind === "reading" && <Reading name={now.name} share={now.share} />}
        {now.kind === "failed" && (
          <p class="empty" role="alert">
            {now.problem}
          </p>
        )}
        {now.kind === "file" && (
          <Recording
            key={now.file.reader.id}
            title={now.file.name}
            reader={now.file.reader}
            version={0}
            problem={now.file.problem}
          />
        )}
        {now.kind === "session" &&
          (session.reader.runs.length === 0 ? (
            <p class="empty">
              This page has run nothing yet. Run a program in the{" "}
              <a href={hrefOf("playground")}>playground</a>, or open a file that{" "}
              <code>af.session(record="run.jsonl")</code> wrote.
            </p>
          ) : (
            <Recording
              key={session.reader.id}
              title="This page's session"
              reader={session.reader}
              version={session.version}
              problem={
                session.isFull ? "The session became too long to be kept: its newest runs are missing." : null
              }
            />
          ))}
      </View>
    </div>
  );
}

/** Offers the session's log as a file. */
function save({ reader, version }: SessionRuns): void {
  const log = sessionLog.peek();
  // The reader may lack the newest lines.
  const url = URL.createObjectURL(log.toBlob(reader.isIdle && version === log.lines.length));
  const link = document.createElement("a");
  link.href = url;
  link.download = "run.jsonl";
  link.click();
  setTimeout(() => URL.revokeObjectURL(url), 60_000);
}

function Reading({ name, share }: { name: string; share: number }) {
  return (
    <div class="panel row reading">
      <label class="row">
        Reading {name}
        <progress max={1} value={share} />
      </label>
      <button type="button" onClick={showSession}>
        Cancel
      </button>
    </div>
  );
}

interface RecordingProps {
  readonly title: string;
  readonly reader: RecordingReader;
  readonly version: number;
  readonly problem: string | null;
}

const BAR_MARGIN = 8;

function Recording({ title, reader, version, problem }: RecordingProps) {
  const [focused, setFocused] = useState<Call | null>(null);
  useEffect(() => {
    if (version === 0) announce(`${title}: ${sentenceOf(reader)}${problem === null ? "" : ` ${problem}`}`);
  }, [reader]);
  const part = useRef<HTMLDivElement>(null);
  const bar = (): Element | null | undefined => part.current?.querySelector('.bar[aria-pressed="true"]');
  // The details stay at the window's lower edge. They may not cover the bar that was chosen.
  useLayoutEffect(() => {
    const details = part.current?.querySelector(".call-details");
    const chosen = bar();
    if (!details || !chosen) return;
    const covered = chosen.getBoundingClientRect().bottom + BAR_MARGIN - details.getBoundingClientRect().top;
    if (covered > 0) scrollBy(0, covered);
  }, [focused]);
  const close = (): void => {
    (bar() as HTMLElement | null | undefined)?.focus();
    setFocused(null);
  };
  const ending = endingOf(reader);
  const { header } = reader;
  return (
    <>
      <div class="part-head">
        <h2>
          <bdi>{title}</bdi>
        </h2>
        <p class="runs-source">
          {[
            header?.model,
            header?.started && new Date(header.started).toLocaleString("en-GB"),
            header?.agentflow && `agentflow ${header.agentflow}`,
          ]
            .filter(Boolean)
            .join(" · ")}
        </p>
      </div>
      {problem !== null && (
        <p class="view-note" data-testid="recording-problem">
          {problem}
        </p>
      )}
      {ending !== null && <p class="view-note">{ending}</p>}
      <Sums reader={reader} />
      {reader.runs.length === 0 ? (
        <p class="empty">It has no run.</p>
      ) : (
        <div class="timeline-part" ref={part}>
          <Timeline reader={reader} version={version} focused={focused} onFocus={setFocused} />
          {focused !== null && (
            <CallDetails key={focused.number} call={focused} reader={reader} version={version} onClose={close} />
          )}
        </div>
      )}
    </>
  );
}

function Sums({ reader }: { reader: RecordingReader }) {
  const { runs, totals, lastS } = reader;
  const rate = totals.promptTokens > 0 ? totals.cachedTokens / totals.promptTokens : null;
  const sums: [string, string, string?][] = [
    ["Runs", count(runs.length), counted(totals.states, "state")],
    ["Calls", count(totals.calls), `in ${duration(lastS)}`],
    [
      "Prompt tokens",
      count(totals.promptTokens),
      `${count(totals.promptTokens - totals.cachedTokens)} computed`,
    ],
    ["From the cache", percent(rate), counted(totals.cachedTokens, "token")],
    ["Output tokens", count(totals.outputTokens)],
  ];
  return (
    <dl class="figures">
      {sums.map(([name, value, note]) => (
        <div key={name} class="figure panel">
          <dt>{name}</dt>
          <dd>
            <span>{value}</span>
            {note && <span class="figure-note">{note}</span>}
          </dd>
        </div>
      ))}
    </dl>
  );
}

function sentenceOf({ runs, totals }: RecordingReader): string {
  return (
    `${counted(runs.length, "run")} with ${counted(totals.states, "state")} and ${counted(totals.calls, "call")}, ` +
    `${count(totals.cachedTokens)} of ${count(totals.promptTokens)} prompt tokens cached.`
  );
}
