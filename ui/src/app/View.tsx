// The frame of a view: its one h1, a sentence about it, actions beside them, and the hook for tests.
import type { ComponentChildren } from "preact";
import type { ViewName } from "./router";

export function View(props: {
  name: ViewName;
  title: string;
  lead?: string;
  actions?: ComponentChildren;
  children: ComponentChildren;
}) {
  return (
    <section class={`view view-${props.name}`} data-testid={`view-${props.name}`}>
      <header class="view-head">
        <div>
          <h1 tabIndex={-1}>{props.title}</h1>
          {props.lead && <p class="lead">{props.lead}</p>}
        </div>
        {props.actions && <div class="row">{props.actions}</div>}
      </header>
      {props.children}
    </section>
  );
}
