#include "engine/machine/support.h"
#include "models/run/machine_plan.h"
#include "models/run/mesh_links.h"
#include "testing.h"

// Plans of whole meshes by the links along their axes.
namespace sluice::models::mesh_plan_test {
using engine::Link;
using engine::machines::small_machine;

// Ranks on hosts that share them evenly, neighbours on one.
TrainSettings on_mesh(const std::string& mesh, int hosts) {
  TrainSettings s;
  s.model = "mini";
  s.memory = kGiB;
  s.batch = 1;
  s.accumulate = 32;
  s.length = 64;
  s.threads = 1;
  // The other choices of a plan could fall on another one of nearly the same time.
  s.plan.stage = 1;
  s.plan.group = 1;
  s.plan.recompute = "none";
  s.mesh = comm::Mesh::parse(mesh);
  s.ranks = {0, s.mesh->ranks()};
  s.ranks_here = s.ranks.size / hosts;
  for (int rank = 0; rank < s.ranks.size && hosts > 1; ++rank) s.ranks.hosts.push_back(rank / s.ranks_here);
  return s;
}

class MeshPlan : public engine::machines::MachineFile {
 protected:
  PlanResult planned(const TrainSettings& s) const { return plan_for_machine(s, machine_); }
  double seconds(TrainSettings s, std::optional<Link> link, std::optional<Link> host_link = {}) const {
    s.link = link;
    s.host_link = host_link;
    const PlanResult plan = planned(s);
    return plan.pipeline ? plan.pipeline->time.step : plan.plan.time.step;
  }
  const engine::Machine machine_ = read(small_machine());
};

constexpr double kSame = 0.995;  // plans whose steps differ by less are chosen by what they move
constexpr double kEndless = std::numeric_limits<double>::infinity();

TEST_F(MeshPlan, OfOneStageIsThatOfRanksAlone) {
  for (const int hosts : {1, 2, 4}) {
    TrainSettings mesh = on_mesh("data=4,pipeline=1", hosts), ranks = mesh;
    ranks.mesh.reset();
    for (const std::optional<Link>& host_link : {std::optional<Link>(), std::optional<Link>({1e10, 2e-6})}) {
      mesh.link = ranks.link = Link{1e8, 1e-4};
      mesh.host_link = ranks.host_link = host_link;
      const PlanResult a = planned(mesh), b = planned(ranks);
      EXPECT_FALSE(a.pipeline);
      EXPECT_EQ(to_json(a.plan, a.profile, a.budget), to_json(b.plan, b.profile, b.budget));
    }
  }
}

// A link that takes no time is as good as none.
TEST_F(MeshPlan, TakesLongerWithSlowerLinks) {
  for (const char* mesh : {"data=4,pipeline=2", "pipeline=2,data=4", "pipeline=4,data=2", "data=8"})
    for (const int hosts : {1, 2, 4, 8}) {
      SCOPED_TRACE(mesh + std::string(" on ") + std::to_string(hosts));
      TrainSettings s = on_mesh(mesh, hosts);
      if (const int stages = sections_of(s); stages > 1) s.stages = stages == 2 ? "0-2,3-5" : "0-1,2-3,4,5";
      const double free = seconds(s, {});
      EXPECT_EQ(seconds(s, Link{kEndless, 0}, Link{kEndless, 0}), free);
      EXPECT_EQ(seconds(s, Link{kEndless, 0}), free);
      double before = free;
      for (const Link link : {Link{1e10, 0}, Link{1e10, 1e-4}, Link{1e8, 1e-4}, Link{1e7, 1e-2}}) {
        const double found = seconds(s, link);
        EXPECT_GE(found, kSame * before) << link.bandwidth;
        before = found;
        double within = found;
        for (const Link host_link : {Link{1e10, 0}, Link{1e9, 1e-4}, Link{1e7, 1e-2}}) {
          if (hosts == 1) continue;
          const double with_both = seconds(s, link, host_link);
          EXPECT_GE(with_both, kSame * within) << link.bandwidth << ", " << host_link.bandwidth;
          within = with_both;
        }
        EXPECT_EQ(within > found, hosts > 1 && hosts < s.ranks.size) << "only ranks that share a host";
      }
      EXPECT_GT(before, free);
    }
}

TEST_F(MeshPlan, CountsEachAxisByItsLink) {
  TrainSettings s = on_mesh("data=2,pipeline=4", 2);  // a pipeline on each host
  s.link = Link{4e9, 1e-3};
  s.host_link = Link{1e8, 2e-3};
  for (int section = 0; section < 3; ++section) {
    EXPECT_EQ(link_between(s, section, section + 1)->bandwidth, 1e8);
    engine::MachineRates rates;
    set_links(s, section, rates);
    EXPECT_EQ(rates.link->bandwidth, 1e9) << "four ranks share the wire";
    EXPECT_EQ(rates.link->latency, 1e-3);
  }
  s = on_mesh("pipeline=4,data=2", 2);  // stages 0 and 1 on one host, 2 and 3 on the other
  s.link = Link{4e9, 1e-3};
  s.host_link = Link{1e8, 2e-3};
  EXPECT_EQ(link_between(s, 0, 1)->bandwidth, 1e8);
  EXPECT_EQ(link_between(s, 1, 2)->bandwidth, 2e9) << "two ranks of stage 1 send at once";
  EXPECT_EQ(link_between(s, 3, 0)->bandwidth, 2e9);
  engine::MachineRates rates;
  set_links(s, 2, rates);
  EXPECT_EQ(rates.link->bandwidth, 1e8);
  EXPECT_FALSE(rates.host_link);
  s.host_link.reset();
  EXPECT_EQ(link_between(s, 0, 1)->bandwidth, kEndless);
  s.link.reset();
  EXPECT_FALSE(link_between(s, 0, 1));
  EXPECT_FALSE(link_between(s, 1, 2));
  s = on_mesh("pipeline=4,data=2", 1);
  s.link = Link{4e9, 1e-3};
  EXPECT_EQ(link_between(s, 1, 2)->bandwidth, 4e9);
  s.host_link = Link{1e8, 2e-3};
  EXPECT_EQ(link_between(s, 1, 2)->bandwidth, 1e8);
}

// A host receives these bytes: of a pipeline that is on it, the sums of its stages; of a stage that is on it,
// the messages of the next stage, for each of its ranks.
TEST_F(MeshPlan, CountsWhatComesFromOtherHosts) {
  const PlanResult columns = planned(on_mesh("data=2,pipeline=2", 2)),
                   rows = planned(on_mesh("pipeline=2,data=2", 2)),
                   alone = planned(on_mesh("data=2,pipeline=2", 1));
  const auto& received = columns.pipeline->received;
  ASSERT_EQ(received.size(), 2u);
  EXPECT_EQ(columns.plan.step_bytes_from_hosts, received[0].data + received[1].data);
  EXPECT_EQ(rows.plan.step_bytes_from_hosts, 2 * rows.pipeline->received[0].pipeline);
  EXPECT_EQ(alone.plan.step_bytes_from_hosts, 0u);
  for (const PlanResult* plan : {&columns, &rows, &alone}) {
    EXPECT_EQ(plan->plan.step_bytes_of_data(), received[0].data);
    EXPECT_EQ(plan->plan.step_bytes_from_sections, received[0].pipeline);
    EXPECT_EQ(plan->plan.step_bytes_received, received[0].data + received[0].pipeline);
    EXPECT_GT(received[0].data, 0u);
  }
}

// Of ranks that compute a micro-batch together, what they exchange meanwhile comes from the other host where
// they are on several.
TEST_F(MeshPlan, CountsWhatLayersGetFromOtherHosts) {
  for (const std::string axis : {"tensor", "sequence"}) {
    const auto on_two_hosts = [&](const std::string& mesh, std::size_t accumulate = 32) {
      TrainSettings s = on_mesh(mesh, 2);
      s.accumulate = accumulate;
      s.length = 256;
      return planned(s).plan;
    };
    const engine::Plan apart = on_two_hosts(axis + "=2"), columns = on_two_hosts(axis + "=2,data=2"),
                       rows = on_two_hosts("data=2," + axis + "=2");
    EXPECT_GT(apart.step_bytes_of_layers, 0u);
    EXPECT_EQ(on_two_hosts(axis + "=2", 512).step_bytes_of_layers, 16 * apart.step_bytes_of_layers) << axis;
    EXPECT_EQ(apart.step_bytes_from_hosts, apart.step_bytes_received) << axis;
    EXPECT_EQ(rows.step_bytes_of_layers, columns.step_bytes_of_layers) << axis;
    EXPECT_GE(columns.step_bytes_from_hosts, 2 * columns.step_bytes_of_layers) << axis;
    EXPECT_LE(rows.step_bytes_from_hosts, 2 * rows.step_bytes_of_data()) << axis;
  }
}

// Of more ranks with as many micro-batches each, a rank receives no less, and no step is shorter.
TEST_F(MeshPlan, IsOfAThousandRanks) {
  double before = 0;
  std::uint64_t received = 0;
  for (const int data : {8, 64, 512}) {
    TrainSettings s = on_mesh("data=" + std::to_string(data) + ",pipeline=2", data / 4);
    s.accumulate = static_cast<std::size_t>(data) * 4;
    s.stages = "0-2,3-5";
    s.link = Link{1e9, 1e-4};
    s.host_link = Link{1e11, 1e-6};
    const PlanResult plan = planned(s);
    EXPECT_EQ(plan.plan.ranks.size, data);
    EXPECT_GE(plan.pipeline->time.step, kSame * before);
    EXPECT_GE(plan.plan.step_bytes_received, received);
    before = plan.pipeline->time.step;
    received = plan.plan.step_bytes_received;
  }
}

// In passes, updates and sums nothing is lost of what the stages' own plans say.
TEST_F(MeshPlan, TakesAtLeastWhatEachStageTakes) {
  for (const char* mesh : {"data=4,pipeline=2", "pipeline=4", "data=2,pipeline=2"}) {
    TrainSettings s = on_mesh(mesh, 1);
    s.link = Link{1e8, 1e-4};
    const PlanResult plan = planned(s);
    const engine::PipelineTime& time = plan.pipeline->time;
    EXPECT_GE(time.busy[0], (1 - 1e-9) * plan.plan.time.step);
    EXPECT_GT(plan.plan.time.updates, 0);
    EXPECT_EQ(plan.plan.time.sums > 0, plan.plan.ranks.size > 1);
    EXPECT_GT(plan.pipeline->bubble(), 0);
    EXPECT_LT(plan.pipeline->bubble(), 1);
  }
}

}  // namespace sluice::models::mesh_plan_test
