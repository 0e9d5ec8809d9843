#include "comm/mesh.h"

#include "testing.h"
#include "thrown.h"

namespace sluice::comm::mesh_test {

TEST(Mesh, NumbersRanksSoThatThoseOfTheLastAxisAreNeighbours) {
  const Mesh mesh = Mesh::parse("data=2,pipeline=3");
  EXPECT_EQ(mesh.ranks(), 6);
  EXPECT_EQ(mesh.size("data"), 2);
  EXPECT_EQ(mesh.size("pipeline"), 3);
  EXPECT_EQ(mesh.coordinate(4, "data"), 1);
  EXPECT_EQ(mesh.coordinate(4, "pipeline"), 1);
  EXPECT_EQ(mesh.along(4, "pipeline"), (std::vector<int>{3, 4, 5}));
  EXPECT_EQ(mesh.along(4, "data"), (std::vector<int>{1, 4}));
  EXPECT_EQ(mesh.place(4), "data 2 of 2, pipeline stage 2 of 3");
  const Mesh other = Mesh::parse("pipeline=3,data=2");
  EXPECT_EQ(other.along(4, "data"), (std::vector<int>{4, 5}));
  EXPECT_EQ(other.along(4, "pipeline"), (std::vector<int>{0, 2, 4}));
  EXPECT_NE(mesh, other);
}

// With any axes each rank is in one group of each axis, at its coordinate, and no two ranks share all
// coordinates.
TEST(Mesh, PutsEachRankInOneGroupOfEachAxis) {
  for (const char* text :
       {"data=1", "pipeline=4", "data=3,pipeline=4", "pipeline=2,data=5", "pipeline=1,data=3"}) {
    const Mesh mesh = Mesh::parse(text);
    std::vector<std::vector<int>> places;
    for (int rank = 0; rank < mesh.ranks(); ++rank) {
      std::vector<int> place;
      for (const char* axis : {"data", "pipeline"}) {
        const std::vector<int> group = mesh.along(rank, axis);
        place.push_back(mesh.coordinate(rank, axis));
        ASSERT_EQ(group.size(), static_cast<std::size_t>(mesh.size(axis)));
        EXPECT_EQ(group.at(static_cast<std::size_t>(place.back())), rank);
        for (const int other : group) EXPECT_EQ(mesh.along(other, axis), group);
      }
      EXPECT_EQ(std::ranges::count(places, place), 0) << text << " rank " << rank;
      places.push_back(place);
    }
  }
}

TEST(Mesh, HasAnAxisOfOneRankWhereNoneIsNamed) {
  const Mesh mesh = Mesh::parse("pipeline=2");
  EXPECT_EQ(mesh.size("data"), 1);
  EXPECT_EQ(mesh.coordinate(1, "data"), 0);
  EXPECT_EQ(mesh.along(1, "data"), (std::vector<int>{1}));
}

TEST(Mesh, HasRanksAcrossAnAxis) {
  const Mesh mesh = Mesh::parse("data=2,pipeline=2,tensor=2");
  EXPECT_EQ(mesh.across(3, "pipeline"), (std::vector<int>{2, 3, 6, 7}));
  EXPECT_EQ(mesh.across(3, "tensor"), (std::vector<int>{1, 3, 5, 7}));
  EXPECT_EQ(mesh.across(0, "sequence").size(), 8u);  // where there is one place alone
}

TEST(Mesh, RefusesWhatIsNone) {
  const auto refusal = [](const char* text) { return message_of([&] { Mesh::parse(text); }); };
  EXPECT_EQ(refusal(""),
            "the mesh '' has '' where an axis and its size must be: give it as data=2,pipeline=4,tensor=2");
  EXPECT_EQ(
      refusal("data=2,"),
      "the mesh 'data=2,' has '' where an axis and its size must be: give it as data=2,pipeline=4,tensor=2");
  EXPECT_EQ(refusal("4"),
            "the mesh '4' has '4' where an axis and its size must be: give it as data=2,pipeline=4,tensor=2");
  EXPECT_EQ(refusal("pipelin=2"),
            "the mesh 'pipelin=2' has an axis 'pipelin': did you mean 'pipeline'?; there are data, pipeline, "
            "tensor, sequence");
  EXPECT_EQ(refusal("=2"), "the mesh '=2' has an axis ''; there are data, pipeline, tensor, sequence");
  EXPECT_EQ(refusal("data=2,data=3"), "the mesh 'data=2,data=3' has the axis 'data' twice");
  for (const char* size : {"", "0", "-1", "2x", " 2", "2.0", "99999999999", "=2"})
    EXPECT_EQ(refusal((std::string("data=") + size).c_str()),
              std::string("the mesh 'data=") + size + "' has an axis of size '" + size +
                  "': it is how many ranks the axis has, 1 or more");
  EXPECT_EQ(refusal("data=1024,pipeline=1025"),
            "the mesh 'data=1024,pipeline=1025' has more than 1048576 ranks");
  EXPECT_EQ(Mesh::parse("data=1024,pipeline=1024").ranks(), Mesh::kMostRanks);
}

}  // namespace sluice::comm::mesh_test
