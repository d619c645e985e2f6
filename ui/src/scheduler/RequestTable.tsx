// Unfinished requests by program and tenant; each group opens to its requests.
import { useState } from "preact/hooks";
import { count, counted, duration } from "../charts/numbers";
import { promptShares, type Group, type Request } from "./requests";

const NAMES = ["Running", "Waiting", "Prompt", "Cached", "Output", "Oldest"];

export function RequestTable({ groups }: { groups: readonly Group[] }) {
  const [open, setOpen] = useState<ReadonlySet<string>>(new Set());
  if (groups.length === 0) return <p class="empty">No request is running or waiting.</p>;
  const toggle = (name: string): void => {
    const next = new Set(open);
    if (!next.delete(name)) next.add(name);
    setOpen(next);
  };
  return (
    <div class="table-frame panel" tabIndex={0} role="region" aria-label="Requests by program and tenant">
      <table>
        <thead>
          <tr>
            <th scope="col">Program and tenant</th>
            {NAMES.map((name) => (
              <th key={name} scope="col">
                {name}
              </th>
            ))}
          </tr>
        </thead>
        {groups.map((group) => {
          const name = JSON.stringify([group.program, group.tenant]);
          return <GroupRows key={name} group={group} isOpen={open.has(name)} toggle={() => toggle(name)} />;
        })}
      </table>
    </div>
  );
}

function GroupRows({ group, isOpen, toggle }: { group: Group; isOpen: boolean; toggle: () => void }) {
  return (
    <tbody>
      <tr>
        <th scope="row">
          <button type="button" class="quiet group" aria-expanded={isOpen} onClick={toggle}>
            <span class="twist" aria-hidden="true" />
            <bdi class={group.program === "" ? "unnamed" : undefined}>
              {group.program || "no program name"}
            </bdi>
            <span class="figure-note">
              of <bdi>{group.tenant || "default"}</bdi>
            </span>
          </button>
        </th>
        <td>{count(group.running)}</td>
        <td>{count(group.waiting)}</td>
        <td>{count(group.promptTokens)}</td>
        <td>{count(group.cachedTokens)}</td>
        <td>{count(group.outputTokens)}</td>
        <td>{duration(group.oldestS)}</td>
      </tr>
      {isOpen && group.requests.map((request) => <RequestRow key={request.id} request={request} />)}
    </tbody>
  );
}

function RequestRow({ request }: { request: Request }) {
  const { cached, computed } = promptShares(request);
  const isRunning = request.status === "running";
  return (
    <tr class="request">
      <th scope="row">
        Request {request.id}
        {request.replica != null && <span class="figure-note"> on replica {request.replica}</span>}{" "}
        <span
          class="prompt-bar"
          role="img"
          aria-label={`Prompt of ${counted(request.prompt_tokens, "token")}: ${Math.round(cached * 100)}% cached, ${Math.round(computed * 100)}% computed`}
        >
          <span class="prompt-cached" style={{ width: `${cached * 100}%` }} />
          <span class="prompt-computed" style={{ width: `${computed * 100}%` }} />
        </span>
      </th>
      <td>{isRunning ? "yes" : ""}</td>
      <td>{isRunning ? "" : "yes"}</td>
      <td>{count(request.prompt_tokens)}</td>
      <td>{count(request.cached_tokens)}</td>
      <td>{count(request.output_tokens)}</td>
      <td>{duration(request.age_s)}</td>
    </tr>
  );
}
