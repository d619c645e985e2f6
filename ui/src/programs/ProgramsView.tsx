// The programs that run: the live graph of each session of the key's tenant, and its states.
import type { LiveGraph } from "agentflow-client";
import { useState } from "preact/hooks";
import { View } from "../app/View";
import "../charts/charts.css";
import { count, counted } from "../charts/numbers";
import { GraphPicture } from "./GraphPicture";
import { useGraphs } from "./graphs";
import { pictureOf } from "./picture";
import { countsOf, missOf, nextOf, stateName, titleOf } from "./words";
import "./programs.css";

const MAX_DRAWN = 300;
/** Rows of the table of one session. */
const MAX_STATES = 100;

export default function ProgramsView() {
  const [isPaused, setPaused] = useState(false);
  const { shown, problem } = useGraphs(isPaused);
  const { sessions, numLeftOut } = shown;
  let room = MAX_DRAWN;
  return (
    <View
      name="programs"
      title="Programs"
      lead="The requests and variables of the programs that run now, and what each one waits for. Nodes that have ended leave, unless something needs them."
      actions={
        <button type="button" aria-pressed={isPaused} onClick={() => setPaused(!isPaused)}>
          {isPaused ? "Resume" : "Pause"}
        </button>
      }
    >
      {problem && sessions.length > 0 && <p class="view-note">{problem}</p>}
      {sessions.length === 0 && (
        <p class="empty">{problem ?? "No state is open: start a run in the playground, or a program in Python."}</p>
      )}
      {sessions.map(({ key, graph, number }) => {
        const section = <SessionGraph key={key} graph={graph} number={number} most={room} />;
        room -= Math.min(room, graph.nodes?.length ?? 0);
        return section;
      })}
      {numLeftOut > 0 && (
        <p class="graph-hint">{counted(numLeftOut, "more session is", "more sessions are")} not shown.</p>
      )}
    </View>
  );
}

function SessionGraph({ graph, number, most }: { graph: LiveGraph; number: number; most: number }) {
  const picture = pictureOf(graph, most);
  const title = titleOf(graph);
  const id = `session-${number}`;
  const session = number === 1 ? "This page" : `Session ${number}`;
  return (
    <section class="program" aria-labelledby={id} data-testid="program">
      <div class="part-head">
        <h2 id={id}>
          {session}: <bdi>{title}</bdi>
        </h2>
        <span class="figure-note">{countsOf(graph) || "nothing runs"}</span>
      </div>
      {picture.nodes.length > 0 && (
        <div class="panel graph-panel">
          <GraphPicture graph={graph} picture={picture} label={`Graph of ${title}`} session={session} />
        </div>
      )}
      {picture.numLeftOut > 0 && (
        <p class="graph-hint">{counted(picture.numLeftOut, "more node is", "more nodes are")} not drawn.</p>
      )}
      <States graph={graph} session={session} />
    </section>
  );
}

function States({ graph, session }: { graph: LiveGraph; session: string }) {
  const states = graph.states ?? [];
  const numMore = Math.max(0, states.length - MAX_STATES) + (graph.num_states_left_out ?? 0);
  return (
    <>
      <div class="table-frame panel" tabIndex={0} role="region" aria-label={`States of ${session}`}>
        <table>
          <thead>
            <tr>
              {["State", "Next request", "Objective", "Task group", "Last request not cached"].map((name) => (
                <th key={name} scope="col">
                  {name}
                </th>
              ))}
            </tr>
          </thead>
          <tbody>
            {states.slice(0, MAX_STATES).map((state) => (
              <tr key={state.id}>
                <th scope="row">
                  <bdi>{stateName(state)}</bdi>
                </th>
                <td>{nextOf(state)}</td>
                <td>{state.has_ended ? "" : (state.objective ?? "latency")}</td>
                <td>{state.group ? count(state.group) : ""}</td>
                <td>{missOf(state.miss_reason, state.missed_tokens)}</td>
              </tr>
            ))}
          </tbody>
        </table>
      </div>
      {numMore > 0 && <p class="graph-hint">{counted(numMore, "more state is", "more states are")} not listed.</p>}
    </>
  );
}
