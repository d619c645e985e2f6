import { View } from "../app/View";

export default function SchedulerView() {
  return (
    <View name="scheduler" title="Scheduler">
      <p class="empty">Nothing here yet.</p>
    </View>
  );
}
