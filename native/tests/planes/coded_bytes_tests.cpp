// What planes are said to take, coded, is what Huffman's code takes where that is known.

#include <cmath>
#include <stdexcept>
#include <vector>

#include "harness.hpp"
#include "planes/byte_planes.hpp"
#include "planes/coded_bytes.hpp"

namespace dsh::test {
namespace {

std::vector<std::byte> chosen(std::size_t count, std::uint64_t values, Random &random) {
    std::vector<std::byte> bytes(count);
    for (std::byte &byte : bytes) {
        byte = static_cast<std::byte>(random.between(0, values - 1));
    }
    return bytes;
}

double of_one_plane(const std::vector<std::byte> &bytes) {
    return coded_bytes(bytes.data(), nullptr, bytes.size(), 1, Transform::plain)[0];
}

bool is_near(double found, double expected) { return std::abs(found - expected) < 0.02 * expected; }

} // namespace

TEST(values_that_are_as_frequent_take_their_bits) {
    Random random(9);
    for (const std::uint64_t values : {2, 4, 16, 64, 256}) {
        const auto bytes = chosen(60'000, values, random);
        CHECK(is_near(of_one_plane(bytes), 60'000 * std::log2(static_cast<double>(values)) / 8));
    }
}

TEST(a_value_that_is_frequent_takes_a_whole_bit) {
    Random random(10);
    // Three in four are 0, the others one of 1 to 16: a bit each, and four more for those.
    std::vector<std::byte> bytes(64'000);
    for (std::byte &byte : bytes) {
        byte = static_cast<std::byte>(random.between(0, 3) != 0 ? 0 : random.between(1, 16));
    }
    CHECK(is_near(of_one_plane(bytes), 64'000 * (1 + 4 / 4.0) / 8));
}

TEST(runs_take_nothing) {
    CHECK(of_one_plane({}) == 0);
    CHECK(of_one_plane(std::vector(100'003, std::byte{7})) == 0);
    Random random(11);
    auto bytes = chosen(10'000, 256, random);
    const double alone = of_one_plane(bytes);
    bytes.resize(200'000, std::byte{5});
    CHECK(is_near(of_one_plane(bytes), alone));
}

TEST(planes_are_those_of_the_transformed_elements) {
    Random random(12);
    const auto base = chosen(8'000, 256, random);
    auto data = base;
    for (std::size_t i = 0; i < data.size(); i += 4) {
        data[i] ^= static_cast<std::byte>(random.between(0, 3));
    }
    const auto alone = coded_bytes(data.data(), base.data(), 2'000, 4, Transform::plain);
    const auto against = coded_bytes(data.data(), base.data(), 2'000, 4, Transform::exclusive);
    for (std::size_t plane = 0; plane < 4; ++plane) {
        CHECK(alone[plane] > 1'900);
        CHECK(plane == 0 ? is_near(against[plane], 2'000 * 2 / 8.0) : against[plane] == 0);
    }
}

TEST(elements_of_other_sizes_are_refused) {
    const std::vector<std::byte> bytes(48);
    for (const std::size_t itemsize : {std::size_t{0}, std::size_t{3}, std::size_t{16}}) {
        bool refused = false;
        try {
            coded_bytes(bytes.data(), nullptr, 1, itemsize, Transform::plain);
        } catch (const std::invalid_argument &) {
            refused = true;
        }
        CHECK(refused);
    }
}

TEST(all_bytes_are_the_same_or_one_is_not) {
    for (const std::size_t count : {1, 2, 7, 8, 9, 1000}) {
        std::vector<std::byte> bytes(count, std::byte{3});
        CHECK(is_constant(bytes));
        for (std::size_t i = 0; count > 1 && i < count; i += 1 + count / 7) {
            bytes[i] = std::byte{4};
            CHECK(!is_constant(bytes));
            bytes[i] = std::byte{3};
        }
    }
    CHECK(is_constant({}));
}

} // namespace dsh::test
